"""The Sparse Transformer's two patterns (Child et al. 2019, arXiv:1904.10509, section 4.3), block by block.

A block of queries sees a block of keys if, by the paper's equations with a stride of whole blocks, any of its queries
sees any of those keys. Every head has both factors of a pattern, which the paper calls merged heads (section 4.2). With
`Mask.causal` this is the paper's attention; in an encoder it extends to both sides.
"""

import numpy as np

from models.attention.patterns.blocks import Blocks


def check_strided(pattern, depth: int, heads: int, number: int) -> None:
    """Raise ValueError if in rows of `number` blocks every query would see every key."""
    if number <= pattern.stride:
        row, least = f"a row has {number} blocks of {pattern.block}", pattern.stride * pattern.block
        raise ValueError(f"model.pattern.stride={pattern.stride}: {row}; lower it, or use more than {least} tokens")


def check_fixed(pattern, depth: int, heads: int, number: int) -> None:
    """Raise the same, and ValueError if all blocks would be summaries."""
    check_strided(pattern, depth, heads, number)
    if pattern.summary >= pattern.stride:
        raise ValueError(f"model.pattern.summary={pattern.summary}: must be below stride={pattern.stride}")


def strided(pattern, depth: int, heads: int, number: int) -> Blocks:
    """Return the blocks at most a stride away, and those a multiple of the stride away; NumPy arrays [depth, ...]."""
    stride, block = pattern.stride, np.arange(number)
    away = block[None] - block[:, None]
    drawn = _listed((abs(away) > stride) & (away % stride == 0))
    return _of_all(drawn, depth, block=pattern.block, offsets=tuple(range(-stride, stride + 1)))


def fixed(pattern, depth: int, heads: int, number: int) -> Blocks:
    """Return the blocks of a query's own stride, counted from the row's start, and the last blocks of every stride."""
    stride, block = pattern.stride, np.arange(number)
    summary = block % stride >= stride - pattern.summary
    together = block[None] // stride == block[:, None] // stride
    drawn = _listed(together & ~summary & (block[None] != block[:, None]))
    return _of_all(drawn, depth, block=pattern.block, columns=tuple(np.flatnonzero(summary).tolist()))


def _listed(named: np.ndarray) -> np.ndarray:
    """Return the indices of true values, ascending, then -1: bool[..., blocks] -> i32[..., n]."""
    order = np.argsort(~named, axis=-1, kind="stable")[..., : int(named.sum(-1).max())]
    return np.where(np.take_along_axis(named, order, -1), order, -1).astype(np.int32)


def _of_all(drawn: np.ndarray, depth: int, **static) -> Blocks:
    """Return Blocks that are the same in all layers and heads."""
    return Blocks(np.broadcast_to(drawn, (depth, 1, *drawn.shape)), **static)
