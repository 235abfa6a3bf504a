"""Longformer's pattern (Beltagy et al. 2020, arXiv:2004.05150, section 3.1): sliding windows, some of them dilated.

Its global tokens are not here: they are chosen in each row (`Mask.globals`).
"""

import numpy as np

from models.attention.patterns.blocks import Blocks


def blocks(pattern, depth: int, heads: int, number: int) -> Blocks:
    """Those of all layers, NumPy arrays [depth, ...]."""
    dilation = np.broadcast_to(np.array(pattern.dilations, np.int32), (depth, len(pattern.dilations)))
    reach = np.broadcast_to(np.array(pattern.windows, np.int32)[:, None] // 2, (depth, 1)) * dilation
    away = min(-(-int(reach.max()) // pattern.block), number - 1)
    drawn = np.zeros((depth, 1, number, 0), np.int32)
    return Blocks(drawn, reach, dilation, block=pattern.block, offsets=tuple(range(-away, away + 1)))
