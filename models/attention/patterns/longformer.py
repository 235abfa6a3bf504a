"""Longformer's pattern (Beltagy et al. 2020, arXiv:2004.05150, section 3.1): sliding windows, some of them dilated.

Its global tokens are not part of the pattern: each row chooses its own (`Mask.globals`).
"""

import numpy as np

from models.attention.patterns.blocks import Blocks


def check(pattern, depth: int, heads: int, number: int) -> None:
    """Raise ValueError if these layers, heads and rows of `number` blocks cannot have the pattern."""
    if odd := [window for window in pattern.windows if window % 2]:
        wrong = f"must be even; use {odd[0] + 1} instead of {odd[0]}"
        raise ValueError(f"model.pattern.windows={list(pattern.windows)}: {wrong}")
    if (widest := max(pattern.dilations)) >= (row := number * pattern.block):
        wrong = f"{widest} reaches beyond a row of {row} tokens; lower it"
        raise ValueError(f"model.pattern.dilations={list(pattern.dilations)}: {wrong}")
    for name, values, parts in ("windows", pattern.windows, "layers"), ("dilations", pattern.dilations, "heads"):
        count = depth if parts == "layers" else heads
        if len(values) not in (1, count):
            wrong = f"must be one for all {parts}, or one for each of the {count}; there are {len(values)}"
            raise ValueError(f"model.pattern.{name}={list(values)}: {wrong}")


def blocks(pattern, depth: int, heads: int, number: int) -> Blocks:
    """Return the blocks of all layers as NumPy arrays [depth, ...]."""
    dilation = np.broadcast_to(np.array(pattern.dilations, np.int32), (depth, len(pattern.dilations)))
    reach = np.array(pattern.windows, np.int64)[:, None] // 2 * dilation  # beyond the row there is nothing to see
    reach = np.minimum(reach, number * pattern.block).astype(np.int32)
    away = min(-(-int(reach.max()) // pattern.block), number - 1)
    drawn = np.zeros((depth, 1, number, 0), np.int32)
    return Blocks(drawn, reach, dilation, block=pattern.block, offsets=tuple(range(-away, away + 1)))
