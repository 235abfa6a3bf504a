"""What is done to documents before anything else, by name: each step makes of the documents of a file, or of a range
of one, those that go on to the next. It may change, annotate, split, drop or add documents.

Long documents come in pieces, of which all but the first are `continues`. A step that drops a document drops all its
pieces; of those that it splits a piece into, only the first may continue what was before. A range may begin within a
document, with a piece that continues what no step sees.

A corpus lists (name, version) of its steps in their order; a function that gives other results gets another version.
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
NESTED = 8  # pairs in pairs that are removed
TAG = re.compile(r"</?[A-Za-z][^<>]*>|<!--[^<>]*-->")
DOCUMENT_TAG = re.compile(r"^(?:<doc id|</doc>)[^\n]*", re.M)
SHORTEST, SHORT = 100, "documents of fewer than 100 characters left out"
BREAK = re.compile(r"\r(?!\n)|[\x0b\x0c\x1c-\x1f\x85]")  # white space: pages, lines and fields end there
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


Drop = Callable[[str], None]  # counts a document that is left out, by the reason


class Step(NamedTuple):
    """run: makes documents of documents; a plain change is `of_text(change)` or `of_document(change)`.   fields: what
    the annotations are that it adds; of a word segmenter, a lexicon."""

    version: int
    run: Callable[[Iterator[Document], Drop], Iterator[Document]]
    fields: dict[str, Field] = {}


def of_document(change: Callable[[Document], Document]) -> Callable[[Iterator[Document], Drop], Iterator[Document]]:
    """Each document, or piece of one, changed by itself."""
    return lambda documents, drop: map(change, documents)


def of_text(change: Callable[[str], str]) -> Callable[[Iterator[Document], Drop], Iterator[Document]]:
    """The texts of each changed, by a function that is told nothing else."""
    return of_document(partial(_changed, change=change))


def without_empty_pairs(text: str) -> str:
    """Brackets and quotation marks around nothing, which removed markup leaves behind."""
    for _ in range(NESTED):
        text, found = EMPTY_PAIR.subn("", text)
        if not found:
            break
    return text


def without_control_characters(text: str) -> str:
    """Tabs and newlines stay; those that separate, as a form feed does, become newlines."""
    return CONTROL.sub("", BREAK.sub("\n", text))


def without_tags(text: str) -> str:
    """No HTML; WikiExtractor's lines where documents begin and end stay."""
    parts, at = [], 0
    for line in DOCUMENT_TAG.finditer(text):
        parts += [TAG.sub("", text[at : line.start()]), line[0]]
        at = line.end()
    return "".join([*parts, TAG.sub("", text[at:])])


def without_short(documents: Iterator[Document], drop: Drop) -> Iterator[Document]:
    """No documents of fewer than SHORTEST characters, whose first pieces may be shorter."""
    size, held = SHORTEST, []  # of a document that began in another range
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
    """A changed document. No change reaches over the edge of an annotation, so that each keeps its characters; one
    that has none left goes."""
    segments, annotations = [], []
    for number, segment in enumerate(document.segments):
        own = [note for note in document.annotations if note.segment == number]
        edges = sorted({0, len(segment.text), *(place for note in own for place in (note.start, note.end))})
        parts = [change(segment.text[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
        moved, at = {0: 0}, 0
        for edge, part in zip(edges[1:], parts, strict=True):
            moved[edge] = at = at + len(part)
        segments.append(segment._replace(text="".join(parts)))
        annotations += [note._replace(start=moved[note.start], end=moved[note.end]) for note in own]
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
    """(name, version) of each. UserError for one that there is not."""
    for name in names:
        if name not in STEPS:
            raise UserError(f"--steps {name}: there is no such step; there are {', '.join(STEPS)}")
    return [(name, STEPS[name].version) for name in names]


def run(names: Iterable[str], documents: Iterable[Document], drop: Drop = lambda reason: None) -> Iterator[Document]:
    """The documents after these steps."""
    documents = iter(documents)
    for name in names:
        documents = STEPS[name].run(documents, drop)
    return documents
