"""Encodes pairs of texts as rows of tokens and splits a long one into overlapping windows."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from data_pipelines.tokenizers.made import Made


class Text(NamedTuple):
    """tokens: i32[n].   offsets: i32[n, 2], begin and end of each token in characters."""

    tokens: np.ndarray
    offsets: np.ndarray


class Frame(NamedTuple):
    """Special tokens and their types before, between and after two texts, i32[m, 2] each.   types: those of the texts.
    place: position of the token that a head reads for the whole row; negative from the end."""

    before: np.ndarray
    between: np.ndarray
    after: np.ndarray
    types: tuple[int, int]
    place: int

    @property
    def size(self) -> int:
        """Number of special tokens in a row."""
        return len(self.before) + len(self.between) + len(self.after)


def frame_of(made: Made) -> Frame:
    """Return the special tokens that the tokenizer puts around two texts. A head reads the `cls` token, or the last
    one, like the delimiter that `texts.ending` puts behind each text."""
    written = made.tokenizer.encode("a", "b")
    both, texts = np.array([written.ids, written.type_ids], np.int32).T, np.array(written.sequence_ids, object)
    first, second = (np.flatnonzero(texts == number) for number in (0, 1))
    parts = both[: first[0]], both[first[-1] + 1 : second[0]], both[second[-1] + 1 :]
    cls = made.special.get("cls")
    place = written.ids.index(cls) if cls in written.ids else len(both) - 1
    from_end = place if place < first[0] else place - len(both)
    return Frame(*parts, (int(both[first[0], 1]), int(both[second[0], 1])), from_end)


def texts_of(made: Made, texts: Iterable[str]) -> dict[str, Text]:
    """Encode each distinct text without special tokens."""
    given = [*dict.fromkeys(texts)]
    encodings = made.tokenizer.encode_batch(given, add_special_tokens=False)
    offsets = lambda one: np.array(one.offsets, np.int32).reshape(-1, 2)
    return {text: Text(np.array(one.ids, np.int32), offsets(one)) for text, one in zip(given, encodings, strict=True)}


def framed(frame: Frame, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and types i32[n] of a row with the tokens of two texts."""
    both = zip((first, second), frame.types, strict=True)
    first, second = (np.stack([tokens, np.full_like(tokens, kind)], axis=1) for tokens, kind in both)
    return tuple(np.concatenate([frame.before, first, frame.between, second, frame.after]).T)


def windows(size: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return begin and end of windows of at most `room` tokens, `stride` apart, that cover `size` tokens."""
    begins = range(0, max(size - room, 0) + stride, stride)
    return [(begin, min(begin + room, size)) for begin in begins]
