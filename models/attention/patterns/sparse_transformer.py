"""The Sparse Transformer's two patterns (Child et al. 2019, arXiv:1904.10509, section 4.3), block by block.

A block of queries sees a block of keys where by the paper's equations, with a stride of whole blocks, one of its
queries sees one of those keys. Every head has both factors of a pattern, which the paper calls merged heads (section
4.2); under `Mask.causal` that is the paper's attention, in an encoder it is the same towards both sides.
"""

import numpy as np

from models.attention.patterns.blocks import Blocks


def check_strided(pattern, depth: int, heads: int, number: int) -> None:
    """ValueError where in rows of so many blocks all would see all."""
    if number <= pattern.stride:
        raise ValueError(
            f"model.pattern.stride={pattern.stride}: a row has {number} blocks of {pattern.block}; lower it, or take "
            f"rows of more than {pattern.stride * pattern.block} tokens"
        )


def check_fixed(pattern, depth: int, heads: int, number: int) -> None:
    """The same, and where all blocks would be summaries."""
    check_strided(pattern, depth, heads, number)
    if pattern.summary >= pattern.stride:
        raise ValueError(
            f"model.pattern.summary={pattern.summary}: must be below model.pattern.stride={pattern.stride}, of whose "
            "blocks it says how many all see"
        )


def strided(pattern, depth: int, heads: int, number: int) -> Blocks:
    """The blocks at most a stride away, and all at a distance of whole strides; NumPy arrays [depth, ...]."""
    stride, block = pattern.stride, np.arange(number)
    away = block[None] - block[:, None]
    drawn = _listed((abs(away) > stride) & (away % stride == 0))
    return _of_all(drawn, depth, block=pattern.block, offsets=tuple(range(-stride, stride + 1)))


def fixed(pattern, depth: int, heads: int, number: int) -> Blocks:
    """The blocks of the own stride, strides counted from the row's start, and the last ones of every stride."""
    stride, block = pattern.stride, np.arange(number)
    summary = block % stride >= stride - pattern.summary
    together = block[None] // stride == block[:, None] // stride
    drawn = _listed(together & ~summary & (block[None] != block[:, None]))
    return _of_all(drawn, depth, block=pattern.block, columns=tuple(np.flatnonzero(summary).tolist()))


def _listed(named: np.ndarray) -> np.ndarray:
    """bool[..., blocks] -> i32[..., n], the numbers of those that are true, ascending, then -1."""
    order = np.argsort(~named, axis=-1, kind="stable")[..., : int(named.sum(-1).max())]
    return np.where(np.take_along_axis(named, order, -1), order, -1).astype(np.int32)


def _of_all(drawn: np.ndarray, depth: int, **static) -> Blocks:
    """Blocks that all layers and heads have."""
    return Blocks(np.broadcast_to(drawn, (depth, 1, *drawn.shape)), **static)
