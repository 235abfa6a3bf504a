"""What is done to documents before anything else, by name: changes of texts, and annotators.

A corpus lists (name, version) of its steps in their order; a function that gives other results gets another version.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
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
BREAK = re.compile(r"\r(?!\n)|[\x0b\x0c\x1c-\x1f\x85]")  # white space: pages, lines and fields end there
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Step(NamedTuple):
    """change: of a text.   annotate: adds annotations, of these fields; a word segmenter, a lexicon."""

    version: int
    change: Callable[[str], str] | None = None
    annotate: Callable[[Document], Document] | None = None
    fields: dict[str, Field] = {}


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


STEPS = {
    "nfc": Step(1, partial(unicodedata.normalize, "NFC")),
    "nfkc": Step(1, partial(unicodedata.normalize, "NFKC")),
    "control-characters": Step(2, without_control_characters),
    "tags": Step(1, without_tags),
    "empty-pairs": Step(1, without_empty_pairs),
}


def check_steps(names: Iterable[str]) -> list[tuple[str, int]]:
    """(name, version) of each. UserError for one that there is not."""
    for name in names:
        if name not in STEPS:
            raise UserError(f"--steps {name}: there is no such step; there are {', '.join(STEPS)}")
    return [(name, STEPS[name].version) for name in names]


def run(names: Iterable[str], document: Document) -> Document:
    """The document after these steps."""
    for name in names:
        step = STEPS[name]
        if step.annotate:
            document = step.annotate(document)
        if step.change:
            document = _changed(document, step.change)
    return document


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
