"""Where sentences begin in a text, found with `sentencex`."""

import re
from collections.abc import Callable, Iterator

import numpy as np
import sentencex

BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
WINDOW = 2000  # characters; sentencex sees no more of a paragraph at a time


def starts(text: str, language: str = "en", panicked: Callable[[], None] = lambda: None) -> np.ndarray:
    """i64 [sentences]: the character with which each sentence begins, which is no white space; in linear time.

    A blank line ends a sentence, one newline does not. A sentence of more than WINDOW characters is cut after a space,
    if it has one. panicked: called for each window that sentencex reads only with plain spaces.
    """
    found = []
    at = 0
    for end, following in _paragraphs(text):
        found += _paragraph(text, at, end, language, panicked)
        at = following
    return np.array(found, np.int64)


def _paragraphs(text: str) -> Iterator[tuple[int, int]]:
    """(where a paragraph ends, where the next one begins)."""
    for blank in BLANK_LINE.finditer(text):
        yield blank.span()
    yield len(text), len(text)


def _paragraph(text: str, at: int, end: int, language: str, panicked) -> Iterator[int]:
    """The starts in text[at:end], found in windows: each window ends where its last whole sentence does."""
    while at < end:
        window = text[at : min(at + WINDOW, end)]
        parts = _segment(language, window.replace("\n", " "), panicked)
        if at + WINDOW < end:
            parts = parts[:-1] or [window[: window.rfind(" ", 1) + 1 or WINDOW]]
        for part in parts:
            space = len(part) - len(part.lstrip())
            if space < len(part):
                yield at + space
            at += len(part)


def _segment(language: str, text: str, panicked) -> list[str]:
    """The sentences of a short text, which they make up with no character more or less."""
    try:
        return sentencex.segment(language, text)
    except BaseException as error:  # it cuts between the bytes of a space that is not ASCII, which ends in Rust's panic
        if type(error).__name__ != "PanicException":
            raise
    panicked()
    return sentencex.segment(language, "".join(" " if character.isspace() else character for character in text))
