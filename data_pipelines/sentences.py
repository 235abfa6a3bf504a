"""Documents to sentences, with `sentencex`."""

import re
from collections.abc import Iterator

import sentencex

BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
WINDOW = 2000  # characters; sentencex takes time quadratic in the length of a paragraph


def split(text: str, language: str = "en") -> list[str]:
    """The sentences of `text`: without newlines or space around them, none empty. A blank line ends a sentence; one
    newline is a space. A sentence of more than WINDOW characters is cut after a space, if it has one."""
    sentences = []
    for paragraph in BLANK_LINE.split(text):
        for window in _windows(paragraph.replace("\n", " ").strip(), language):
            sentences += [sentence for part in window if (sentence := part.strip())]
    return sentences


def _windows(paragraph: str, language: str) -> Iterator[list[str]]:
    """The parts of a paragraph, found in windows: each window ends where its last whole sentence does."""
    while len(paragraph) > WINDOW:
        parts = sentencex.segment(language, paragraph[:WINDOW])[:-1]
        if not parts:
            parts = [paragraph[: paragraph.rfind(" ", 1, WINDOW) + 1 or WINDOW]]
        yield parts
        paragraph = paragraph[sum(map(len, parts)) :]
    if paragraph:
        yield sentencex.segment(language, paragraph)
