"""What a format yields, before tokens: named texts, values of spans of their characters, and values of the whole."""

from collections.abc import Mapping
from typing import NamedTuple


class Segment(NamedTuple):
    """A named text of a document: 'text' where a format knows no names; 'source' and 'target' of a translation."""

    name: str
    text: str
    language: str = ""  # where it is not that of the source


class Annotation(NamedTuple):
    """A value of the characters [start, end) of a segment's text."""

    field: str
    segment: int  # index
    start: int
    end: int
    value: str | int | tuple[int, ...]


class Document(NamedTuple):
    """A document, or one of the pieces in which a long one comes: of the segments in turn, with their annotations."""

    segments: tuple[Segment, ...]
    annotations: tuple[Annotation, ...] = ()
    continues: bool = False  # goes on with the document before
    values: Mapping[str, object] = {}  # by name: of a format all that it has, of a source those that are kept


def plain(text: str, continues: bool = False) -> Document:
    """A document of one text without a name."""
    return Document((Segment("text", text),), (), continues)
