"""A sparse pattern in the form that attention reads: which blocks of keys each block of queries sees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one layer, or, with [depth] before each array, of all layers, as `stack` takes them.

    A query of block i sees the keys of the existing blocks i + offsets, of `columns` and of drawn[:, i]; queries of
    `rows` see all keys. A block named by both an offset and a column counts once; each time that it is drawn it counts
    once more. So drawn blocks must differ from the others, except in tests against an implementation that repeats them.

    drawn: i32[heads or 1, query blocks, n], -1 for none; n may be 0.
    reach: i32[heads or 1] or None; in the blocks at `offsets`, only keys at most this many tokens away are seen,
    dilation: i32[heads or 1], and only at distances that are multiples of it; None if reach is None.
    block: tokens of a block.   offsets, columns, rows: ascending; static.
    The last block of a row may be shorter than the others.
    """

    drawn: Array | np.ndarray
    reach: Array | np.ndarray | None = None
    dilation: Array | np.ndarray | None = None
    block: int = dataclasses.field(default=64, metadata={"static": True})
    offsets: tuple[int, ...] = dataclasses.field(default=(0,), metadata={"static": True})
    columns: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    rows: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def number(self) -> int:
        """Blocks of a row."""
        return self.drawn.shape[-2]

    def sizes(self, length: int) -> np.ndarray:
        """Return the tokens in each block of a row of this length."""
        return np.minimum(self.block, length - np.arange(self.number) * self.block)


def earlier(blocks: Blocks) -> Blocks:
    """Drop `offsets` and `drawn` blocks after the query's own, in Blocks of NumPy arrays; keep `columns` and `rows`."""
    after = blocks.drawn > np.arange(blocks.number)[:, None]
    left = np.sort(np.where(after | (blocks.drawn < 0), blocks.number, blocks.drawn), axis=-1)
    most = int((left < blocks.number).sum(-1).max(initial=0))
    drawn = np.where(left < blocks.number, left, -1)[..., :most].astype(np.int32)
    offsets = tuple(offset for offset in blocks.offsets if offset <= 0)
    return dataclasses.replace(blocks, drawn=drawn, offsets=offsets)


def counts(blocks: Blocks, length: int) -> Array:
    """Return how often each query sees each key, i32[heads or 1, length, length]: the dense definition."""
    number, position = blocks.number, jnp.arange(length)
    block = position // blocks.block
    offset = block[None, :] - block[:, None]  # [queries, keys]
    near = jnp.isin(offset, jnp.array(blocks.offsets, jnp.int32))[None]
    if blocks.reach is not None:
        distance = jnp.abs(position[None, :] - position[:, None])
        near &= (distance <= blocks.reach[:, None, None]) & (distance % blocks.dilation[:, None, None] == 0)
    column = jnp.isin(block, jnp.array(blocks.columns, jnp.int32))
    row = jnp.isin(block, jnp.array(blocks.rows, jnp.int32))
    drawn = (blocks.drawn[..., None] == jnp.arange(number)).sum(-2)  # [heads, query blocks, key blocks]
    of_blocks = drawn[:, block][:, :, block]
    of_others = (near | column[None, None, :]).astype(jnp.int32) + of_blocks
    return jnp.where(row[None, :, None], 1, of_others)
