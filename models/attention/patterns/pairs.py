"""How many (query, key) pairs attention computes under a sparse pattern, counted from its tables alone."""

import numpy as np

from models.attention.patterns.blocks import Blocks
from models.attention.patterns.pattern import DENSE, Pattern, on_host


def pairs(pattern: Pattern, depth: int, heads: int, length: int, chosen: int = 0, causal: bool = False) -> np.ndarray:
    """Return the pairs of each layer in a row of this length, the mean over its heads, f64[depth]: the sum of `counts`.

    chosen: number of global tokens that the row names (`Mask.globals`); the result is the mean over all ways to choose
    them.   causal: whether a query sees no key after itself.
    """
    whole = length * (length + 1) / 2 if causal else float(length**2)
    if pattern.name == DENSE:
        return np.full(depth, whole)
    blocks = on_host(pattern, depth, heads, length, causal)
    sizes, columns, rows = blocks.sizes(length), np.array(blocks.columns, int), np.array(blocks.rows, int)[:, None]
    others = np.setdiff1d(np.arange(blocks.number), rows)[:, None]  # blocks whose queries do not see all keys
    everywhere = _between(sizes, rows, np.arange(blocks.number), causal).sum()
    everywhere += _between(sizes, others, columns, causal).sum()
    drawn = blocks.drawn[:, :, others[:, 0]]
    drawn = np.where(drawn >= 0, _between(sizes, others, np.maximum(drawn, 0), causal), 0).sum((2, 3)).mean(1)
    seen = everywhere + drawn + _near(blocks, sizes, others[:, 0], causal)
    if not chosen:
        return seen
    hidden = (length - chosen) * (length - chosen - 1) / (length * (length - 1))  # share with neither token chosen
    return whole - (whole - seen) * hidden


def _between(sizes: np.ndarray, queries: np.ndarray, keys: np.ndarray, causal: bool) -> np.ndarray:
    """Return the pairs of tokens of two blocks, given by their numbers in the row."""
    of_queries, every = sizes[queries], sizes[queries] * sizes[keys]
    own = (keys == queries) * of_queries * (of_queries + 1) // 2
    return np.where(keys < queries, every, own) if causal else every


def _near(blocks: Blocks, sizes: np.ndarray, others: np.ndarray, causal: bool) -> np.ndarray:
    """Return the pairs of the window that are not in columns, f64[depth]."""
    if blocks.reach is None:
        return np.full(len(blocks.drawn), _window(blocks, sizes, others, causal), float)
    reach, dilation = np.broadcast_arrays(blocks.reach, blocks.dilation)
    both = np.stack([reach, dilation], -1).reshape(-1, 2)
    different, which = np.unique(both, axis=0, return_inverse=True)
    found = np.array([_window(blocks, sizes, others, causal, *limits) for limits in different.tolist()], float)
    return found[which.reshape(reach.shape)].mean(1)


def _window(blocks: Blocks, sizes: np.ndarray, others: np.ndarray, causal: bool, *limits: int) -> int:
    """Return the same for one head.   limits: its reach and dilation, if the pattern has them."""
    found = 0
    for offset in blocks.offsets:
        queries = others[(others + offset >= 0) & (others + offset < blocks.number)]
        queries = queries[~np.isin(queries + offset, blocks.columns)]
        if limits:
            found += near(blocks.block, offset, sizes[queries], sizes[queries + offset], causal, *limits).sum()
        else:
            found += _between(sizes, queries, queries + offset, causal).sum()
    return found


def near(
    block: int, offset: int, query_sizes: np.ndarray, key_sizes: np.ndarray, causal: bool, reach: int, dilation: int
) -> np.ndarray:
    """Return the pairs i64[n] within reach and dilation between queries in blocks of `query_sizes` tokens and keys in
    blocks of `key_sizes` tokens, `offset` blocks away."""
    shift = np.arange(1 - block, block)  # of a key in its block against the query in its own
    distance = offset * block + shift
    allowed = (abs(distance) <= reach) & (distance % dilation == 0) & ((distance <= 0) | (not causal))
    sizes, which = np.unique(np.stack([query_sizes, key_sizes]), axis=1, return_inverse=True)
    query_sizes, key_sizes = sizes[..., None]
    with_shift = np.maximum(np.minimum(query_sizes, key_sizes - shift) - np.maximum(0, -shift), 0)  # [sizes, shifts]
    return (with_shift * allowed).sum(1)[which.ravel()]
