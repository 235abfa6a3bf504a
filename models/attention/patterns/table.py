"""The table of a sparse pattern for one head: which blocks of keys each block of queries sees, and why."""

import numpy as np

from models.attention.patterns.pairs import near
from models.attention.patterns.pattern import Pattern, on_host

WINDOW, DRAWN, GLOBAL = 1, 2, 3


def table(pattern: Pattern, depth: int, heads: int, length: int, layer: int, head: int) -> np.ndarray:
    """Return u8[query blocks, key blocks] of a pattern that is not dense, for one layer and head: WINDOW, DRAWN, GLOBAL
    (a column that all see, or a row that sees all), or 0 where no query sees any key."""
    blocks = on_host(pattern, depth, heads, length)
    at = lambda array: array[layer, min(head, array.shape[1] - 1)]
    sizes, query_blocks = blocks.sizes(length), np.arange(blocks.number)
    kinds = np.zeros((blocks.number,) * 2, np.uint8)
    query, place = np.nonzero(at(blocks.drawn) >= 0)
    kinds[query, at(blocks.drawn)[query, place]] = DRAWN
    for offset in blocks.offsets:
        queries = query_blocks[(query_blocks + offset >= 0) & (query_blocks + offset < blocks.number)]
        if blocks.reach is not None:
            limits = int(at(blocks.reach)), int(at(blocks.dilation))
            seen = near(blocks.block, offset, sizes[queries], sizes[queries + offset], False, *limits)
            queries = queries[seen > 0]
        kinds[queries, queries + offset] = WINDOW
    kinds[:, list(blocks.columns)] = kinds[list(blocks.rows)] = GLOBAL
    return kinds
