"""What a format is, and the values that pass between a source, its plan and its reader."""

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
    options: Any  # a frozen dataclass of the format
    language: str = "en"  # en,de: of the first and the second segment
    unit: int | None = None  # bytes of text in a unit of work, if fewer than SHARD
    values: tuple[Value, ...] = ()  # the values to keep of each document
    task_prefix: str = ""  # put before the first of two segments

    @property
    def shard(self) -> int:
        return min(self.unit or SHARD, SHARD)

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of records to read; those with the text come first."""
        return tuple(dict.fromkeys([*self.options.fields, *(value.field for value in self.values if value.field)]))

    def __str__(self) -> str:
        return printable(f"{self.kind}:{self.location}" if self.location else self.kind)


@dataclass(frozen=True)
class NoOptions:
    """The options of a format that has none."""


@dataclass(frozen=True)
class Decoding:
    """The options of a format whose text is bytes."""

    undecodable: str = "replace"  # or "skip": what to do with a document (or token, or pair) that is not UTF-8


class Other(NamedTuple):
    """The second file of a range, which is read beside the first."""

    path: str
    start: int
    end: int | None
    version: str


class Range(NamedTuple):
    """Part of a source: bytes of a plain file, row groups of Parquet, examples of TFDS; 0 and None: the whole file."""

    source: int  # index of the source; the plan of all sources sets it
    path: str
    start: int
    end: int | None
    size: int  # bytes of text, or an estimate of them
    continues: bool = False  # begins inside a document of the range before
    version: str = ""  # of the file, changes with its content; "": unknown
    other: Other | None = None


@dataclass(frozen=True)
class Format:
    """One kind of source: an entry of the table."""

    options: type  # a frozen dataclass; prepare's options of the same names set its fields
    ranges: Callable[[Source, Problems, Sequence[str]], Iterable[Range]]
    """(source, problems to note in, paths to leave out) -> ranges of the source, in order."""
    read: Callable[[Source, Range, Problems], Iterator[Document]]
    location: str = "DIR_OR_PATTERN"  # the form of the text after the colon; "": nothing
    segments: Callable[[Any], tuple[str, ...]] = lambda options: ("text",)
    """options -> the names that segments may have."""
    annotations: Callable[[Any], dict[str, Field]] = lambda options: {}
    """options -> the fields of tokens or sentences that annotations fill; with values=() if these are texts."""
    values: tuple[str, ...] | None = ()
    """The values that documents have; None: the fields of their records."""
