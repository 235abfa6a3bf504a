"""Text steps, by name, which documents go through before anything else. A step turns the documents of a file, or of a
range of one, into those for the next step. It may change, annotate, split, drop or add documents.

Long documents come in pieces, of which all but the first are `continues`. A step that drops a document drops all its
pieces; if it splits a piece, only the first new piece may continue the document before. A range may begin inside a
document, with a piece that continues one that the step does not see.

A corpus lists (name, version) of its steps in order; a step whose results change gets a new version.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.store.fields import Field

PAIRS = ["()", "（）", "[]", "［］", "{}", "《》", "〈〉", "【】", "〔〕", "「」", "『』", "“”", "‘’"]
EMPTY_PAIR = re.compile("|".join(rf"{re.escape(begin)}\s*{re.escape(end)}" for begin, end in PAIRS))
NESTED = 8  # levels of nested pairs to remove
TAG = re.compile(r"</?[A-Za-z][^<>]*>|<!--[^<>]*-->")
DOCUMENT_TAG = re.compile(r"^(?:<doc id|</doc>)[^\n]*", re.M)
SHORTEST, SHORT = 100, "documents of fewer than 100 characters left out"
BREAK = re.compile(r"\r(?!\n)|[\x0b\x0c\x1c-\x1f\x85]")  # white space that separates pages, lines or fields
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


Drop = Callable[[str], None]  # counts a document that is left out, with the reason


class Step(NamedTuple):
    """run: turns documents into documents; a simple change is `of_text(change)` or `of_document(change)`.   fields: of
    the annotations that it adds, as a word segmenter or a lexicon does."""

    version: int
    run: Callable[[Iterator[Document], Drop], Iterator[Document]]
    fields: dict[str, Field] = {}


def of_document(change: Callable[[Document], Document]) -> Callable[[Iterator[Document], Drop], Iterator[Document]]:
    """Return the `run` of a step that changes each document, or piece of one, by itself."""
    return lambda documents, drop: map(change, documents)


def of_text(change: Callable[[str], str]) -> Callable[[Iterator[Document], Drop], Iterator[Document]]:
    """Return the `run` of a step that changes each text by itself."""
    return of_document(partial(_changed, change=change))


def without_empty_pairs(text: str) -> str:
    """Remove brackets and quotation marks around nothing, which removed markup leaves behind."""
    for _ in range(NESTED):
        text, found = EMPTY_PAIR.subn("", text)
        if not found:
            break
    return text


def without_control_characters(text: str) -> str:
    """Remove control characters except tabs and newlines; separators, such as a form feed, become newlines."""
    return CONTROL.sub("", BREAK.sub("\n", text))


def without_tags(text: str) -> str:
    """Remove HTML tags, but keep the lines of WikiExtractor at which documents begin and end."""
    parts, at = [], 0
    for line in DOCUMENT_TAG.finditer(text):
        parts += [TAG.sub("", text[at : line.start()]), line[0]]
        at = line.end()
    return "".join([*parts, TAG.sub("", text[at:])])


def without_short(documents: Iterator[Document], drop: Drop) -> Iterator[Document]:
    """Drop documents of fewer than SHORTEST characters; the first piece of a longer one may be shorter."""
    size, held = SHORTEST, []  # a document that began in another range is kept
    for piece in documents:
        if not piece.continues:
            if held:
                drop(SHORT)
            size, held = 0, []
        size += sum(len(segment.text) for segment in piece.segments)
        held.append(piece)
        if size >= SHORTEST:
            yield from held
            held = []
    if held:
        drop(SHORT)


def _changed(document: Document, change: Callable[[str], str]) -> Document:
    """Change a document's texts. No change reaches over the edge of an annotation, so annotations keep their
    characters; an annotation without characters is dropped."""
    segments, annotations = [], []
    for number, segment in enumerate(document.segments):
        notes = [note for note in document.annotations if note.segment == number]
        edges = sorted({0, len(segment.text), *(place for note in notes for place in (note.start, note.end))})
        parts = [change(segment.text[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
        moved, at = {0: 0}, 0
        for edge, part in zip(edges[1:], parts, strict=True):
            moved[edge] = at = at + len(part)
        segments.append(segment._replace(text="".join(parts)))
        annotations += [note._replace(start=moved[note.start], end=moved[note.end]) for note in notes]
    kept = tuple(note for note in annotations if note.start < note.end)
    return document._replace(segments=tuple(segments), annotations=kept)


STEPS = {
    "nfc": Step(1, of_text(partial(unicodedata.normalize, "NFC"))),
    "nfkc": Step(1, of_text(partial(unicodedata.normalize, "NFKC"))),
    "control-characters": Step(2, of_text(without_control_characters)),
    "tags": Step(1, of_text(without_tags)),
    "empty-pairs": Step(1, of_text(without_empty_pairs)),
    "short": Step(1, without_short),
}


def check_steps(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return (name, version) of each step. Raises UserError for an unknown step."""
    for name in names:
        if name not in STEPS:
            raise UserError(f"--steps {name}: there is no such step; use {', '.join(STEPS)}")
    return [(name, STEPS[name].version) for name in names]


def run(names: Iterable[str], documents: Iterable[Document], drop: Drop = lambda reason: None) -> Iterator[Document]:
    """Yield the documents after these steps."""
    documents = iter(documents)
    for name in names:
        documents = STEPS[name].run(documents, drop)
    return documents
