"""Texts of different length as few kinds of batches, so that few programs are compiled."""

from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from models.core.family import Inputs
from tpu.batches import place_rows

SHORTEST = 32  # tokens of the rows of the first kind; those of the next have twice as many
BATCH = 4096  # tokens of a batch of rows


def batches(texts: Sequence[np.ndarray], positions: int, mesh: Mesh) -> Iterator[tuple[list[int], Inputs]]:
    """(which texts, then rows of them with padding behind, on the mesh), the longest first: memory is short at once or
    never.   texts: i32[tokens] each, at most as many as there are positions."""
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
