"""What a format yields, before tokens: named texts, and values of spans of their characters."""

from typing import NamedTuple


class Segment(NamedTuple):
    """A named text of a document: 'text' where a format knows no names; 'source' and 'target' of a translation."""

    name: str
    text: str


class Annotation(NamedTuple):
    """A value of the characters [start, end) of a segment's text."""

    field: str
    segment: int  # index
    start: int
    end: int
    value: str | int | tuple[int, ...]


class AnnotationField(NamedTuple):
    """What the annotations of one name are."""

    dtype: str  # 'label': values are strings, of which there are few
    shape: tuple[int, ...] = ()
    per: str = "token"  # or "sentence"


class Document(NamedTuple):
    """A document, or one of the pieces in which a long one comes: of the segments in turn, with their annotations."""

    segments: tuple[Segment, ...]
    annotations: tuple[Annotation, ...] = ()
    continues: bool = False  # goes on with the document before
    code: str = ""  # the control code that it names itself


def plain(text: str, continues: bool = False) -> Document:
    """A document of one text without a name."""
    return Document((Segment("text", text),), (), continues)
