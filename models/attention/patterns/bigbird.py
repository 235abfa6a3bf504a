"""BigBird's pattern (Zaheer et al. 2020, arXiv:2007.14062, section 2): window, random and global blocks."""

import numpy as np

from models.attention.patterns.blocks import Blocks


def check_odd(window: int, prefix: str) -> None:
    """Raise ValueError for a window of blocks without one in the middle."""
    if window % 2 == 0:
        raise ValueError(f"{prefix}window={window}: must be odd; use {window - 1} or {window + 1}")


def check(pattern, depth: int, heads: int, number: int) -> None:
    """Raise ValueError if rows of `number` blocks cannot have the pattern."""
    check_odd(pattern.window, "model.pattern.")
    needed = (pattern.global_blocks + pattern.window + pattern.random) * pattern.block
    row, cure = f"a row has {number} blocks of {pattern.block}", f"lower it, or use rows of at least {needed} tokens"
    if (many := pattern.global_blocks) >= number:
        raise ValueError(f"model.pattern.global_blocks={many}: {row}, which would all be global; {cure}")
    begins, ends = _window(pattern, number)
    least = number - pattern.global_blocks - int((ends - begins).max())
    if pattern.random > least:
        others = f"for some queries only {least} of them are neither global nor in the window"
        raise ValueError(f"model.pattern.random={pattern.random}: {row}; {others}; {cure}")


def blocks(pattern, depth: int, heads: int, number: int) -> Blocks:
    """Return the blocks of all layers as NumPy arrays [depth, ...].
    How many blocks draw a given block is random in each head of each layer: pattern.random on average, with a standard
    deviation of about its square root."""
    first, last = _ends(pattern)
    ends, half = (*range(first), *range(number - last, number)), min(pattern.window // 2, number - 1)
    begins_ends = _window(pattern, number)
    drawn = np.full((depth, heads, number, pattern.random), -1, np.int32)
    for layer in range(depth):
        for head in range(heads):
            # RandomState's streams are the same in every version of NumPy; Generator's may change.
            random = np.random.RandomState([pattern.seed, layer, head])
            shares = random.random_sample((number - first - last, pattern.random))
            drawn[layer, head, first : number - last] = _others(shares, first, number - first - last, *begins_ends)
    return Blocks(drawn, block=pattern.block, offsets=tuple(range(-half, half + 1)), columns=ends, rows=ends)


def _ends(pattern) -> tuple[int, int]:
    """Return the number of global blocks at the beginning and at the end of the row."""
    return -(-pattern.global_blocks // 2), pattern.global_blocks // 2


def _window(pattern, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the window of each block that is not global begins and ends (exclusive), without global blocks."""
    (first, last), half = _ends(pattern), pattern.window // 2
    query_blocks = np.arange(first, number - last)
    return np.maximum(query_blocks - half, first), np.minimum(query_blocks + half + 1, number - last)


def _others(shares: np.ndarray, first: int, inner: int, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Turn shares [rows, n] in [0, 1) into n blocks outside each row's window, ascending; all sets of n are equally
    likely.

    first, inner: choose from `inner` blocks from `first` on.   begins, ends: of each row's window, which is excluded.
    """
    free = inner - (ends - begins)
    chosen = np.empty(shares.shape, np.int64)
    for number in range(shares.shape[1]):
        left = free - number
        place = np.minimum((shares[:, number] * left).astype(np.int64), left - 1)  # among those not yet chosen
        for earlier in range(number):  # ascending, so that each step passes one block that is taken
            place += place >= chosen[:, earlier]
        chosen[:, number] = place
        chosen[:, : number + 1].sort(axis=1)
    return first + chosen + np.where(chosen >= (begins - first)[:, None], (ends - begins)[:, None], 0)
