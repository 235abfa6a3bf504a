"""What a format is, and what passes between a source, its plan and its reader."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from data_pipelines.document import Document
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.formats.values import Value
from data_pipelines.store.fields import Field

SHARD = 8 << 20  # bytes of source per unit of work


@dataclass(frozen=True)
class Source:
    """Where documents come from and how to read them."""

    kind: str  # a name in the table of formats
    location: str
    options: Any  # the format's own frozen dataclass
    language: str = "en"  # en,de: of the first segment and of the second
    unit: int | None = None  # bytes of text in a unit of work, where they are to be fewer than SHARD
    values: tuple[Value, ...] = ()  # what is kept of each document
    task_prefix: str = ""  # of documents of two segments, the text before the first

    @property
    def shard(self) -> int:
        return min(self.unit or SHARD, SHARD)

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of records that are read, those of the text first."""
        return tuple(dict.fromkeys([*self.options.fields, *(value.field for value in self.values if value.field)]))

    def __str__(self) -> str:
        return printable(f"{self.kind}:{self.location}" if self.location else self.kind)


@dataclass(frozen=True)
class NoOptions:
    """Of a format that has none."""


@dataclass(frozen=True)
class Decoding:
    """Of a format whose text is bytes."""

    undecodable: str = "replace"  # or "skip": what to do with a document (or token, or pair) that is not UTF-8


class Other(NamedTuple):
    """The file that is read beside the one of a range."""

    path: str
    start: int
    end: int | None
    version: str


class Range(NamedTuple):
    """Part of a source: bytes of a plain file, row groups of Parquet, examples of TFDS; 0 and None: all of a file."""

    source: int  # index, which the plan of all sources sets
    path: str
    start: int
    end: int | None
    size: int  # bytes of text, or an estimate of them
    continues: bool = False  # begins inside a document that began in the range before
    version: str = ""  # of the file: another one once its content has changed; "": not known
    other: Other | None = None


@dataclass(frozen=True)
class Format:
    """One kind of source: an entry of the table."""

    options: type  # a frozen dataclass; prepare's options of the same names set its fields
    ranges: Callable[[Source, Problems, Sequence[str]], Iterable[Range]]
    """(the source, what was left out, paths that are no part of it) -> its ranges, in order."""
    read: Callable[[Source, Range, Problems], Iterator[Document]]
    location: str = "DIR_OR_PATTERN"  # what follows the colon; "": nothing
    segments: Callable[[Any], tuple[str, ...]] = lambda options: ("text",)
    """options -> the names that segments may have."""
    annotations: Callable[[Any], dict[str, Field]] = lambda options: {}
    """options -> the fields of tokens or sentences that the annotations fill; values () where these are texts."""
    values: tuple[str, ...] | None = ()
    """What values its documents may have; None: the fields of their records."""
