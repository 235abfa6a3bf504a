"""Which keys the queries of a row see: a sparse pattern as a config field, its tables made on the host by NumPy.

A pattern is drawn in blocks of tokens, so that what computes it touches the blocks that it names and no others. Tables
depend on nothing but the fields, the layer, the head and the length: every host, restart and mesh has the same ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention.patterns import bigbird, longformer, sparse_transformer
from models.attention.patterns.blocks import Blocks, earlier
from models.core.ranges import COUNT, COUNT_OR_NONE, SEED, check_ranges
from models.core.sharding import parts_of

DENSE = "dense"
RANGES = dict.fromkeys(("block", "window", "stride", "summary"), COUNT)
RANGES |= {"random": COUNT_OR_NONE, "global_blocks": COUNT_OR_NONE, "seed": SEED}


@dataclasses.dataclass(frozen=True)
class Pattern:
    """PATTERNS says which fields a pattern reads; others have no effect on it."""

    name: str = DENSE  # dense, bigbird, longformer, strided or fixed
    block: int = 64  # tokens of a block
    window: int = 3  # bigbird: blocks around a query's own, with it; odd
    random: int = 3  # bigbird: further blocks, drawn for each layer, head and block of queries
    global_blocks: int = 2  # bigbird: blocks that see all and that all see, at both ends of the row
    seed: int = 0  # bigbird: of the drawn blocks
    # longformer: even, tokens around a query; of each layer, or one for all. All layers cost what the widest one does,
    windows: tuple[int, ...] = (512,)
    # and all heads: distances between those tokens; of each head, or one for all; what lies between is computed, too
    dilations: tuple[int, ...] = (1,)
    stride: int = 8  # strided: blocks on each side of a query's own, and from one further block to the next
    # fixed: blocks of each part that the row is cut into; a query sees its own part
    summary: int = 1  # fixed: blocks at the end of each part, that all see

    def __post_init__(self):
        if self.name not in (DENSE, *PATTERNS):
            raise ValueError(f"model.pattern.name={self.name!r}: use one of {', '.join((DENSE, *PATTERNS))}")
        check_ranges(self, RANGES, "model.pattern.")
        for field in ("windows", "dilations"):
            values = getattr(self, field)
            if not values or not all(map(COUNT.holds, values)):
                raise ValueError(f"model.pattern.{field}={list(values)}: must be numbers, each {COUNT.words}")


class Made(NamedTuple):
    """How a pattern is made.

    blocks: (pattern, depth, heads, number of blocks) -> Blocks of NumPy arrays [depth, ...].
    check: (the same) -> None; ValueError names the setting that they cannot have.
    fields: of Pattern, those that it reads beside its name.
    """

    blocks: Callable[[Pattern, int, int, int], Blocks]
    check: Callable[[Pattern, int, int, int], None] = lambda pattern, depth, heads, number: None
    fields: tuple[str, ...] = ()


PATTERNS: Mapping[str, Made] = {
    "bigbird": Made(bigbird.blocks, bigbird.check, ("block", "window", "random", "global_blocks", "seed")),
    "longformer": Made(longformer.blocks, longformer.check, ("block", "windows", "dilations")),
    "strided": Made(sparse_transformer.strided, sparse_transformer.check_strided, ("block", "stride")),
    "fixed": Made(sparse_transformer.fixed, sparse_transformer.check_fixed, ("block", "stride", "summary")),
}


def fields_of(name: str) -> tuple[str, ...]:
    """The fields beside its name that a pattern reads."""
    return () if name == DENSE else PATTERNS[name].fields


def check(pattern: Pattern, depth: int, heads: int, length: int) -> None:
    """ValueError, a line that names the setting, where these layers and heads cannot have it in such rows."""
    if pattern.name != DENSE:
        PATTERNS[pattern.name].check(pattern, depth, heads, -(-length // pattern.block))


def encoders(config) -> dict[str, tuple[int, int]]:
    """Of a config with a pattern, depth and heads of what has it: '' for the model, or its parts by their names."""
    if not hasattr(config, "pattern"):
        return {}
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    of = {"": config} if "heads" in parts else {name: part for name, part in parts.items() if hasattr(part, "heads")}
    return {name: (part.depth, part.heads) for name, part in of.items()}


def blocks_of(pattern: Pattern, depth: int, heads: int, length: int, causal: bool = False) -> Blocks | None:
    """The arrays [depth, ...] of all layers for rows of this length, for `stack`'s states; None where all see all.

    causal: without the blocks after a query's own, which a causal mask hides.
    ValueError where a mesh cuts rows into other than whole blocks, or does not divide the heads.
    """
    if pattern.name == DENSE:
        return None
    parts, _ = parts_of(("length", "heads"), (length, heads))
    if parts > 1 and length % (parts * pattern.block):
        raise ValueError(
            f"--mesh sequence={parts} cuts rows of {length} tokens into parts that are no multiple of "
            f"model.pattern.block={pattern.block}: choose a length that {parts * pattern.block} divides"
        )
    return jax.tree.map(jnp.asarray, on_host(pattern, depth, heads, length, causal))


def on_host(pattern: Pattern, depth: int, heads: int, length: int, causal: bool = False) -> Blocks:
    """The same as NumPy arrays, of a pattern that is not dense."""
    check(pattern, depth, heads, length)
    return _made(PATTERNS[pattern.name].blocks, pattern, depth, heads, -(-length // pattern.block), causal)


@functools.lru_cache(maxsize=16)
def _made(blocks: Callable, pattern: Pattern, depth: int, heads: int, number: int, causal: bool) -> Blocks:
    made = blocks(pattern, depth, heads, number)
    made = earlier(made) if causal else made
    for array in jax.tree.leaves(made):
        array.setflags(write=False)  # all who ask for it get this one
    return made
