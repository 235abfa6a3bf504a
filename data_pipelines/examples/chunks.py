"""Plan rows by index: find where each example begins, once, from the sentences' offsets.

The layouts fill rows with whole sentences, so each sentence points to one other: the first sentence after a row that
begins here. These pointers are computed for all sentences at once and then followed from the first sentence. Memory
while planning: about 50 bytes per sentence.
"""

from array import array

import numpy as np


def ranks(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lay groups of these sizes (int64 [n]) end to end. Returns each item's group, and its rank 0, 1, .. there."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def units(sentences: np.ndarray, longest: int, piece: int) -> np.ndarray:
    """Cut sentences of more than `longest` tokens every `piece` tokens and drop empty ones. sentences: offsets, int64
    [sentences + 1]. Returns offsets int64 [units + 1], the last of which is the total."""
    offsets = sentences[np.flatnonzero(np.diff(sentences, prepend=-1))]
    lengths = np.diff(offsets)
    parts = np.where(lengths > longest, -(-lengths // piece), 1)
    sentence, rank = ranks(parts)
    return np.append(offsets[sentence] + rank * piece, offsets[-1:])


def document_starts(part, split: str) -> np.ndarray:
    """Return the token offsets at which a part's nonempty documents begin, then the total: int64 [documents + 1]."""
    offsets = part.sentences(split)[part.documents(split)]
    return offsets[np.flatnonzero(np.diff(offsets, prepend=-1))]


def follow(following: np.ndarray) -> np.ndarray:
    """Return 0, following[0], following[following[0]], ..., len(following): int64. following: int64 [units], rising."""
    count = len(following)
    following = memoryview(following)  # indexing it is several times faster than indexing an array
    visited = array("q")
    unit = 0
    while unit < count:
        visited.append(unit)
        unit = following[unit]
    visited.append(count)
    return np.array(visited, np.int64)
