"""The hidden states of texts of different length, in few kinds of batches, so that few programs are compiled."""

from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from models.core.family import Inputs
from models.core.parameters import Params
from models.core.sharding import placed_by
from tpu.batches import place_rows
from tpu.rules import activation_rules
from tpu.xla import compiler_options, matmul_precision

SHORTEST = 32  # tokens of the rows of the first kind; those of the next have twice as many
BATCH = 4096  # tokens of a batch of rows


def hidden_states(
    model: nn.Module, params: Params, texts: Sequence[np.ndarray], mesh: Mesh
) -> Iterator[tuple[list[int], Array]]:
    """(which texts, then rows of their states by a causal decoder, [rows, length, width] on the mesh, with padding
    behind and below), the longest first: memory is short at once or never.

    texts: i32[tokens] each, at most as many as the model has positions.   params: on the mesh.
    """

    def decode(params: Params, inputs: Inputs) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            return model.apply({"params": params}, inputs, method="decode")

    decode = jax.jit(decode, compiler_options=compiler_options(mesh))
    for chosen, inputs in _batches(texts, model.config.positions, mesh):
        yield chosen, decode(params, inputs)


def _batches(texts: Sequence[np.ndarray], positions: int, mesh: Mesh) -> Iterator[tuple[list[int], Inputs]]:
    kinds: dict[int, list[int]] = {}
    for index, text in enumerate(texts):
        length = SHORTEST
        while length < len(text):
            length *= 2
        kinds.setdefault(min(length, positions), []).append(index)
    for length, inside in sorted(kinds.items(), reverse=True):
        number = min(max(BATCH // length, 1), len(inside))
        number = -(-number // mesh.size) * mesh.size
        for begin in range(0, len(inside), number):
            chosen = inside[begin : begin + number]
            tokens, segments = np.zeros((2, number, length), np.int32)
            for row, index in enumerate(chosen):
                tokens[row, : len(texts[index])], segments[row, : len(texts[index])] = texts[index], 1
            yield chosen, place_rows({"tokens": tokens, "segments": segments}, np.arange(number), number, mesh)
