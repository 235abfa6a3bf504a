"""What a layout is: how the rows of a batch are made of a corpus's parts. Which rows come when is no part of it."""

import abc
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError


class Feature(NamedTuple):
    """What an array of a batch holds of each row. fill: what it holds of a row that only fills up a batch and counts
    nowhere; of a label, none of its classes."""

    shape: tuple[int, ...]
    dtype: Any = np.int32
    fill: float = 0

    def blank(self, rows: int) -> np.ndarray:
        """Rows that fill up: [rows, *shape]."""
        return np.full((rows, *self.shape), self.fill, self.dtype)


@dataclass(frozen=True)
class Layout(abc.ABC):
    """Base of frozen dataclasses. length: tokens per row. least: the shortest rows that have room for text; UserError
    for shorter ones. multiple: what the number of rows of a batch, and of each lane and source, is a multiple of.
    prefixed: whether rows have what stands before documents, as control codes."""

    least: ClassVar[int] = 1
    multiple: ClassVar[int] = 1
    prefixed: ClassVar[bool] = False

    length: int

    def __post_init__(self):
        if self.length < self.least:
            raise UserError(f"length {self.length} leaves no room for text; use at least {self.least}")

    @property
    @abc.abstractmethod
    def spec(self) -> dict[str, Feature]:
        """A batch's arrays, by name."""

    @property
    def tokens(self) -> int:
        """Tokens of a row in all its arrays that a model reads: of rows of an input and a target, both."""
        return self.length

    def examples_of(self, sizes: Mapping[str, int]) -> int:
        """About how many rows there are of so many documents, sentences and tokens, without reading them."""
        return -(-sizes["tokens"] // self.length)

    def check(self, corpus: Corpus) -> None:
        """Raises UserError for a corpus without the special tokens."""
        return

    def check_rows(self, rows: int) -> None:
        """Raises UserError where a batch or a lane cannot have so many rows."""
        if rows % self.multiple:
            cure = "change the batch size or order.lanes"
            raise UserError(f"{rows} rows in a lane are no multiple of {self.multiple}: {cure}")


class RowLayout(Layout):
    """Of rows that stand alone.

    copies: how many keys an example has, which epochs take in turn; 0: another one in every epoch.
    """

    copies = 0

    @abc.abstractmethod
    def plan(self, part, split: str, seed: int) -> Any:
        """Where each example of a part begins. Its `number` says how many there are; it reads offsets, no tokens."""

    @abc.abstractmethod
    def build(self, chosen: "Chosen", keys: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of examples, with the noise of their keys (uint64 [n]): name -> array [n, ...]."""


class StreamLayout(Layout):
    """Of rows that go on where the same row of the batch before has ended, in a stream of documents.

    A stream has a number of tokens, from which all else follows: its examples, and how many steps so many rows have.
    Of the examples, as of the rows, each `multiple`-th goes on by itself, as where half of them run backwards.
    """

    @abc.abstractmethod
    def number(self, total: int) -> int:
        """Examples in a stream of so many tokens."""

    def steps(self, total: int, rows: int) -> int:
        """Steps of so many rows that a stream of so many tokens has."""
        return self.number(total) // rows

    def example(self, total: int, rows: int, row: np.ndarray, step: np.ndarray) -> np.ndarray:
        """The examples of rows at steps of the stream: int64 [n] each."""
        way, row = np.divmod(row, rows // self.multiple)
        return way * (self.number(total) // self.multiple) + row * self.steps(total, rows) + step

    def fixed(self, total: int, limit: int, batch_size: int) -> Iterator[np.ndarray]:
        """The examples of each batch of a fixed set, at most `limit` in all but one of each way, which come by turns,
        rows continuing each other: int64 [n]."""
        number, ways = self.number(total) // self.multiple, np.arange(self.multiple)
        for chosen in consecutive(number, max(limit // len(ways), 1), batch_size // len(ways)):
            yield (chosen[:, None] + number * ways).ravel()

    @abc.abstractmethod
    def plan(self, pieces: Sequence["Piece"], split: str, key: int, epoch: int, first: int = 0) -> Any:
        """The stream of some pieces in a (key, epoch)'s order; first: documents before it that have a number."""

    @abc.abstractmethod
    def build(self, plan: Any, example: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of examples (int64 [n]) of a stream, with the noise of their keys (uint64 [n]): name -> array."""


class Piece(NamedTuple):
    """A stretch of a part's documents as a stream, each followed by an end token: the tokens begin .. end - 1 of it."""

    part: Any
    begin: int
    end: int


class Chosen:
    """Examples of several plans, as they come in a batch.

    plans: those of the parts. which: int64 [n], the plan of each row. example: int64 [n], within its plan.
    """

    def __init__(self, plans: Sequence[Any], which: np.ndarray, example: np.ndarray):
        self.plans, self.which, self.example = plans, which, example

    @functools.cached_property
    def groups(self) -> list[tuple[Any, Any, np.ndarray]]:
        """(a plan; what takes its rows of arrays [n, ...]; their examples) for each plan that has some."""
        if len(self.plans) == 1:
            return [(self.plans[0], slice(None), self.example)]
        order = np.argsort(self.which.astype(np.uint16), kind="stable")  # by radix, which 16 bits have
        ends = np.searchsorted(self.which[order], np.arange(len(self.plans) + 1))
        groups = ((plan, order[ends[index] : ends[index + 1]]) for index, plan in enumerate(self.plans))
        return [(plan, rows, self.example[rows]) for plan, rows in groups if len(rows)]

    def gather(self, function: Callable) -> tuple[np.ndarray, ...]:
        """function(plan, rows, examples), which gives arrays [m, ...] for the m rows of a group, for all: [n, ...]."""
        if len(self.groups) == 1:
            return function(*self.groups[0])
        gathered = None
        for plan, rows, example in self.groups:
            arrays = function(plan, rows, example)
            if gathered is None:
                gathered = tuple(np.empty((len(self.example), *array.shape[1:]), array.dtype) for array in arrays)
            for whole, array in zip(gathered, arrays, strict=True):
                whole[rows] = array
        return gathered

    def read(self, field: str, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` values of a field from each row's start (int64 [n]), in its plan's part and split: [n, length]."""
        return self.gather(lambda plan, rows, _: (plan.part.read(plan.split, field, starts[rows], length),))[0]


def spread(number: int, limit: int, batch_size: int) -> Iterator[np.ndarray]:
    """At most `limit` of `number` examples, spread evenly over all, in batches: int64 [n]."""
    count = min(limit, number)
    chosen = np.arange(count) * number // max(count, 1)
    for first in range(0, count, batch_size):
        yield chosen[first : first + batch_size]


def consecutive(number: int, limit: int, batch_size: int) -> Iterator[np.ndarray]:
    """The first of `number` examples, at most `limit`, in batches in which every row continues the same row of the
    batch before: int64 [n]. Only the last row may end before the others."""
    count = min(limit, number)
    steps = -(-count // batch_size)
    runs = np.arange(0, count, max(steps, 1))  # where each row begins
    for step in range(steps):
        yield runs[runs + step < count] + step
