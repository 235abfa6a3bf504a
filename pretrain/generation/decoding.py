"""Prompts continued by a causal model: `generate`, with the settings of `Decoding`."""

import math
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.core.noise import row_keys
from models.core.parameters import Params
from models.families.registry import FAMILIES, name_of
from pretrain.generation.loop import program
from pretrain.generation.settings import Decoding
from pretrain.objectives.protocols import Writer
from tpu.mesh import mesh_shape, row_mesh

ROWS = 64  # written at the same time, at most
SHORTEST = 16  # places for prompts: a power of two from this one on, so that few programs are compiled


def generate(
    model: nn.Module,
    params: Params,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    seed: int = 0,
    number: int = 1,
    mesh: Mesh | None = None,
    program: Callable = program,
) -> list[list[list[int]]]:
    """For each prompt `number` continuations, without the prompt, up to the first stop token with it.

    What is drawn for a prompt depends on the seed, its place among the prompts, and which of its continuations it is.
    mesh: where the parameters lie cut over several devices, that of them.   program: what writes them, as
    `loop.program` does.   UserError for what cannot be continued.
    """
    _check(model, prompts, decoding, number)
    mesh = mesh or row_mesh(jax.local_devices(), [1])
    write = program(model, decoding, mesh)
    samples = number if decoding.beams == 1 else 1
    order = sorted(range(len(prompts)), key=lambda prompt: len(prompts[prompt]))  # of like length together
    rows = [(prompt, sample) for prompt in order for sample in range(samples)]
    found = [[] for _ in prompts]
    for batch in _batches(rows, max(1, ROWS // decoding.beams), mesh_shape(mesh).batch_parts):
        tokens, segments = left_padded([prompts[prompt] for prompt, _ in batch])
        of_prompts, of_samples = np.array(batch, np.uint32).T
        noise = row_keys(seed, of_samples, of_prompts)
        texts = np.asarray(write(params, tokens, segments, noise))  # [rows, texts of each, n]
        for (prompt, sample), written in zip(batch, texts, strict=True):
            if len(found[prompt]) == sample:  # else one that fills the batch up
                for text in written[:number].tolist():
                    end = next((place for place, token in enumerate(text) if token in decoding.stop), len(text))
                    found[prompt].append(text[: end + 1])
    return found


def check_whole_rows(text: str | None, mesh: Mesh) -> None:
    """UserError where --mesh cuts what is written one token at a time.   text: as it was given."""
    if mesh_shape(mesh).sequence > 1:
        raise UserError(f"--mesh {text}: sequence cuts rows, texts grow token by token; use data, fsdp or tensor")


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments i32[rows, places] of texts that end together."""
    places = max(SHORTEST, power_of_two(max(map(len, prompts))))
    tokens, segments = np.zeros((2, len(prompts), places), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, places - len(prompt) :] = prompt
        segments[row, places - len(prompt) :] = 1
    return tokens, segments


def _check(model: nn.Module, prompts: Sequence[Sequence[int]], decoding: Decoding, number: int) -> None:
    if not isinstance(model, Writer):
        able = [name for name, family in FAMILIES.items() if issubclass(family.trunk, Writer)]
        raise UserError(f"a model of {name_of(model.config)} cannot continue texts; those of {', '.join(able)} can")
    if cut := getattr(model, "clusters", ()):
        raise UserError(
            f"a model whose vocabulary model.cutoffs={cut} cuts cannot continue texts; train one without them"
        )
    vocab_size, positions = model.config.vocab_size, getattr(model.config, "positions", math.inf)
    for field in "beams", "top_k":
        if (value := getattr(decoding, field)) > vocab_size:
            raise UserError(f"--{field.replace('_', '-')} {value}: the vocabulary has {vocab_size} tokens; give fewer")
    several = decoding.beams if decoding.beams > 1 else number if decoding.sample else 1
    if not 1 <= number <= several:
        cure = f"give up to --beams {decoding.beams}" if decoding.beams > 1 else "add --sample, or --beams"
        raise UserError(f"--number {number}: there are not so many texts of a prompt; {cure}")
    for index, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise UserError(f"prompt {index}: has no tokens; begin it with some text")
        if len(prompt) + decoding.max_tokens > positions:
            raise UserError(
                f"prompt {index}: {len(prompt)} tokens and --max-tokens {decoding.max_tokens} are more than the "
                f"{positions} positions of the model; shorten it, or give fewer"
            )


def _batches(rows: list[tuple[int, int]], most: int, parts: int) -> Iterator[list[tuple[int, int]]]:
    """Batches of a power of two rows, so that few programs are compiled, or of a multiple that a mesh cuts into equal
    parts; the last one is filled up with its last row."""
    for begin in range(0, len(rows), most):
        batch = rows[begin : begin + most]
        yield batch + batch[-1:] * (math.lcm(power_of_two(len(batch)), parts) - len(batch))


def power_of_two(number: int) -> int:
    """The smallest that is as large."""
    return 1 << (number - 1).bit_length()
