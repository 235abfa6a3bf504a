"""Which documents of a part are kept for evaluation."""

import numpy as np

ENOUGH = 50_000  # tokens of the whole corpus; below that up to MOST of the documents may be held out
MOST = 0.05


def choose(hashes: np.ndarray, tokens: np.ndarray, fraction: float, parts: int) -> np.ndarray:
    """bool [documents]: those whose hash is smallest, `fraction` of all, and up to MOST of all where those have too few
    tokens; documents of the same text go the same way, and never the larger share of the tokens is held out.

    hashes: uint64 [documents]. tokens: int64 [documents]. parts: of the corpus, which have to be ENOUGH together.
    """
    held = np.zeros(len(hashes), bool)
    if not fraction or len(hashes) < 2:
        return held
    order = np.argsort(hashes, kind="stable")
    first = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[0]]))  # of each text
    sizes, copies = np.add.reduceat(tokens[order], first), np.diff(first, append=len(order))
    limit, left = np.uint64(fraction * 2**64), int(tokens.sum()) // 2
    most, taken, enough = max(int(MOST * len(hashes)), 1), 0, -(-ENOUGH // parts)
    for at, begin in enumerate(first):  # few: the loop ends at the first that is not wanted
        if not (hashes[order[begin]] < limit or (enough > 0 and taken < most)):
            break
        size, number = int(sizes[at]), int(copies[at])
        if size <= left:
            held[order[begin : begin + number]] = True
            left, enough, taken = left - size, enough - size, taken + number
    return held


def missing(held: int, total: int, fraction: float, parts: int) -> int:
    """How many tokens of a part are held out too few, where `held` of `total` are."""
    return max(int(fraction * total), min(-(-ENOUGH // parts), int(MOST * total))) - held if fraction else 0


def end_to_hold(lengths: np.ndarray, wanted: int, most: int) -> int:
    """How many sentences at the end of a document have `wanted` tokens or the next more, but at most `most`.
    lengths: int64 [sentences]."""
    after = np.cumsum(lengths[::-1])
    return min(int(np.searchsorted(after, wanted)) + 1, int(np.searchsorted(after, most, "right")))
