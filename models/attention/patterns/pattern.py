"""Sparse attention patterns as a config field; NumPy builds their tables on the host.

A pattern is made of blocks of tokens, so that attention touches only the blocks that it names. Tables depend only on
the fields, the layer, the head and the length: every host, restart and mesh builds the same ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention.patterns import bigbird, longformer, sparse_transformer
from models.attention.patterns.blocks import Blocks, earlier
from models.core.ranges import COUNT, COUNT_OR_NONE, SEED, check_choices, check_ranges
from models.core.sharding import parts_of

DENSE = "dense"
RANGES = dict.fromkeys(("block", "window", "stride", "summary"), COUNT)
RANGES |= {"random": COUNT_OR_NONE, "global_blocks": COUNT_OR_NONE, "seed": SEED}


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern and its settings. PATTERNS says which fields each pattern reads; the others have no effect on it."""

    name: str = DENSE  # dense, bigbird, longformer, strided or fixed
    block: int = 64  # tokens of a block
    window: int = 3  # bigbird: blocks in a query's window, its own block in the middle; odd
    random: int = 3  # bigbird: random blocks, drawn for each layer, head and block of queries
    global_blocks: int = 2  # bigbird: blocks that see all and that all see, split between both ends of the row
    seed: int = 0  # bigbird: random seed of the drawn blocks
    # longformer: tokens around a query, even; one for each layer or one for all; all layers cost what the widest does
    windows: tuple[int, ...] = (512,)
    # longformer: distance between those tokens; one for each head or one for all; skipped tokens are computed, too
    dilations: tuple[int, ...] = (1,)
    # strided: blocks on each side of a query's own, and distance in blocks between those beyond; fixed: blocks of each
    # part that the row is cut into, of which a query sees its own
    stride: int = 8
    summary: int = 1  # fixed: blocks at the end of each part, which all queries see

    def __post_init__(self):
        check_choices(self, {"name": (DENSE, *PATTERNS)}, "model.pattern.")
        check_ranges(self, RANGES, "model.pattern.")
        for field in ("windows", "dilations"):
            values = getattr(self, field)
            if not values or not all(map(COUNT.holds, values)):
                raise ValueError(f"model.pattern.{field}={list(values)}: must be numbers, each {COUNT.words}")


class Made(NamedTuple):
    """How a pattern is built.

    blocks: (pattern, depth, heads, number of blocks) -> Blocks of NumPy arrays [depth, ...].
    check: (the same) -> None; raises ValueError that names a setting that does not fit the others.
    fields: the fields of Pattern that it reads besides its name.
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
    """Return the fields that a pattern reads besides its name."""
    return () if name == DENSE else PATTERNS[name].fields


def check(pattern: Pattern, depth: int, heads: int, length: int) -> None:
    """Raise ValueError, a line that names the setting, if these layers, heads and rows cannot have the pattern."""
    if pattern.name != DENSE:
        PATTERNS[pattern.name].check(pattern, depth, heads, -(-length // pattern.block))


def encoders(config) -> dict[str, tuple[int, int]]:
    """Return (depth, heads) of each part of a model that has the config's pattern, by name; '' if it is the model."""
    if not hasattr(config, "pattern"):
        return {}
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    stacks = {"": config} if "heads" in parts else {name: p for name, p in parts.items() if hasattr(p, "heads")}
    return {name: (part.depth, part.heads) for name, part in stacks.items()}


def blocks_of(pattern: Pattern, depth: int, heads: int, length: int, causal: bool = False) -> Blocks | None:
    """Return the arrays [depth, ...] of all layers for rows of this length, for `stack`'s states; None for full
    attention.
    causal: leave out the blocks after a query's own, which a causal mask hides.
    Raises ValueError if a mesh cuts rows into parts that are not whole blocks, or does not divide the heads."""
    if pattern.name == DENSE:
        return None
    parts, _ = parts_of(("length", "heads"), (length, heads))
    if parts > 1 and length % (parts * pattern.block):
        wrong = f"cuts rows of {length} tokens into parts that are no multiple of model.pattern.block={pattern.block}"
        raise ValueError(f"--mesh sequence={parts} {wrong}: choose a length that {parts * pattern.block} divides")
    return jax.tree.map(jnp.asarray, on_host(pattern, depth, heads, length, causal))


def on_host(pattern: Pattern, depth: int, heads: int, length: int, causal: bool = False) -> Blocks:
    """Return the same as NumPy arrays, for a pattern that is not dense."""
    check(pattern, depth, heads, length)
    return _made(PATTERNS[pattern.name].blocks, pattern, depth, heads, -(-length // pattern.block), causal)


@functools.lru_cache(maxsize=16)
def _made(blocks: Callable, pattern: Pattern, depth: int, heads: int, number: int, causal: bool) -> Blocks:
    made = blocks(pattern, depth, heads, number)
    made = earlier(made) if causal else made
    for array in jax.tree.leaves(made):
        array.setflags(write=False)  # all callers share it
    return made
