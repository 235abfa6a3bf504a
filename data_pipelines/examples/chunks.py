"""Plan rows by index: where each example begins, worked out once from the sentences' offsets.

Both layouts fill a row with whole sentences, so from every sentence there is one next: the sentence with
which a row beginning here would hand over. These pointers are computed for all sentences at once and then
followed from the first. Memory while planning: about 50 bytes per sentence.
"""

from array import array

import numpy as np


def ranks(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of so many things each (int64 [n]), laid end to end: which one a thing is of, and its rank 0, 1, .. there."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def units(sentences: np.ndarray, longest: int, piece: int) -> np.ndarray:
    """Sentence offsets (int64 [sentences + 1]) with sentences of more than `longest` tokens cut every `piece`
    tokens, and without empty ones: int64 [units + 1], ending with the total."""
    offsets = sentences[np.flatnonzero(np.diff(sentences, prepend=-1))]
    lengths = np.diff(offsets)
    parts = np.where(lengths > longest, -(-lengths // piece), 1)
    sentence, rank = ranks(parts)
    return np.append(offsets[sentence] + rank * piece, offsets[-1:])


def document_starts(part, split: str) -> np.ndarray:
    """Token offsets at which a part's documents begin, without empty ones, then the total: int64 [documents + 1]."""
    offsets = part.sentences(split)[part.documents(split)]
    return offsets[np.flatnonzero(np.diff(offsets, prepend=-1))]


def follow(following: np.ndarray) -> np.ndarray:
    """0, following[0], following[following[0]], ... up to and with len(following).

    following: int64 [units], each above its own index. Returns int64.
    """
    count = len(following)
    following = memoryview(following)  # indexing it is several times faster than indexing an array
    visited = array("q")
    unit = 0
    while unit < count:
        visited.append(unit)
        unit = following[unit]
    visited.append(count)
    return np.array(visited, np.int64)
