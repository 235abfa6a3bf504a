"""BigBird's pattern (Zaheer et al. 2020, arXiv:2007.14062, section 2): window, random and global blocks."""

import numpy as np

from models.attention.patterns.blocks import Blocks


def blocks(pattern, depth: int, heads: int, number: int) -> Blocks:
    """Those of all layers, NumPy arrays [depth, ...]."""
    first, last = -(-pattern.global_blocks // 2), pattern.global_blocks // 2
    ends = (*range(first), *range(number - last, number))
    half = pattern.window // 2
    drawn = np.full((depth, heads, number, pattern.random), -1, np.int32)
    for layer in range(depth):
        for head in range(heads):
            # RandomState's streams are the same in every version of NumPy; Generator's may change.
            random = np.random.RandomState([pattern.seed, layer, head])
            for block in range(first, number - last):
                others = np.setdiff1d(np.arange(number), [*ends, *range(block - half, block + half + 1)])
                drawn[layer, head, block] = np.sort(random.choice(others, pattern.random, replace=False))
    return Blocks(drawn, block=pattern.block, offsets=tuple(range(-half, half + 1)), columns=ends, rows=ends)
