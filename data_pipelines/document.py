"""What a format yields, before tokens: named texts, values of character spans, and values of the whole document."""

from collections.abc import Mapping
from typing import NamedTuple


class Segment(NamedTuple):
    """A named text of a document: 'text' where a format knows no names; 'source' and 'target' of a translation."""

    name: str
    text: str
    language: str = ""  # if it differs from the source's


class Annotation(NamedTuple):
    """A value of the characters [start, end) of a segment's text."""

    field: str
    segment: int  # index
    start: int
    end: int
    value: str | int | tuple[int, ...]


class Document(NamedTuple):
    """A document, or one piece of a long document: pieces have the segments in turn, with their annotations."""

    segments: tuple[Segment, ...]
    annotations: tuple[Annotation, ...] = ()
    continues: bool = False  # continues the document before
    values: Mapping[str, object] = {}  # by name: a format yields all, a source keeps some


def plain(text: str, continues: bool = False) -> Document:
    """Return a document with a single text."""
    return Document((Segment("text", text),), (), continues)
