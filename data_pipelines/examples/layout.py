"""Layouts: how the rows of a batch are made from a corpus's parts. Which rows come when is decided elsewhere."""

import abc
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError


class Feature(NamedTuple):
    """What an array of a batch holds for each row. fill: its value in a row that only fills up a batch and counts
    nowhere; for a label, none of its classes."""

    shape: tuple[int, ...]
    dtype: Any = np.int32
    fill: float = 0

    def blank(self, rows: int) -> np.ndarray:
        """Return rows that fill up a batch: [rows, *shape]."""
        return np.full((rows, *self.shape), self.fill, self.dtype)


@dataclass(frozen=True)
class Layout(abc.ABC):
    """Base of frozen dataclasses. length: tokens per row. least: the shortest length with room for text; shorter ones
    raise UserError. multiple: the number of rows of a batch, a lane and a source is a multiple of it. prefixed: whether
    rows have what stands before documents, such as control codes."""

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
        """The arrays of a batch, by name."""

    @property
    def tokens(self) -> int:
        """Tokens of a row in all arrays that a model reads: for rows of an input and a target, both."""
        return self.length

    def examples_of(self, sizes: Mapping[str, int]) -> int:
        """Estimate the number of rows of so many documents, sentences and tokens, without reading them."""
        return -(-sizes["tokens"] // self.length)

    def check(self, corpus: Corpus) -> None:
        """Raise UserError if the corpus lacks the special tokens."""
        return

    def check_rows(self, rows: int) -> None:
        """Raise UserError if a batch or a lane cannot have so many rows."""
        if rows % self.multiple:
            cure = "change the batch size or order.lanes"
            raise UserError(f"{rows} rows in a lane are not a multiple of {self.multiple}: {cure}")


class RowLayout(Layout):
    """A layout of rows that stand alone.   copies: keys of an example, which epochs use in turn; 0: always new ones."""

    copies = 0

    @abc.abstractmethod
    def plan(self, part, split: str, seed: int) -> Any:
        """Return where each example of a part begins; the plan's `number` counts them. Reads offsets, no tokens."""

    @abc.abstractmethod
    def build(self, chosen: "Chosen", keys: np.ndarray) -> dict[str, np.ndarray]:
        """Build the rows of examples, with the noise of their keys (uint64 [n]): name -> array [n, ...]."""


class StreamLayout(Layout):
    """A layout of rows that continue the same row of the batch before, in a stream of documents. The number of tokens
    of a stream determines its examples, and how many steps so many rows have. Examples and rows are divided into
    `multiple` equal ways, each a sequence of its own, for instance if half of the rows run backwards."""

    @abc.abstractmethod
    def number(self, total: int) -> int:
        """Return the number of examples in a stream of `total` tokens."""

    def steps(self, total: int, rows: int) -> int:
        """Return the number of steps of `rows` rows in a stream of `total` tokens."""
        return self.number(total) // rows

    def example(self, total: int, rows: int, row: np.ndarray, step: np.ndarray) -> np.ndarray:
        """Return the examples of rows at steps of the stream: int64 [n] each."""
        way, row = np.divmod(row, rows // self.multiple)
        return way * (self.number(total) // self.multiple) + row * self.steps(total, rows) + step

    def fixed(self, total: int, limit: int, batch_size: int) -> Iterator[np.ndarray]:
        """Yield the examples of each batch of a fixed set, whose rows continue each other: int64 [n]. There are at most
        `limit`, but at least one of each way; ways take turns."""
        number, ways = self.number(total) // self.multiple, np.arange(self.multiple)
        for chosen in consecutive(number, max(limit // len(ways), 1), batch_size // len(ways)):
            yield (chosen[:, None] + number * ways).ravel()

    @abc.abstractmethod
    def plan(self, pieces: Sequence["Piece"], split: str, key: int, epoch: int, first: int = 0) -> Any:
        """Return the stream of some pieces in the order of (key, epoch). first: the number of its first document."""

    @abc.abstractmethod
    def build(self, plan: Any, example: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Build rows of examples (int64 [n]) of a stream, with the noise of their keys (uint64 [n]): name -> array."""


class Piece(NamedTuple):
    """Tokens begin .. end - 1 of a part's documents as a stream, in which an end token follows each document."""

    part: Any
    begin: int
    end: int


class Chosen:
    """Examples from several plans, in the order of a batch.

    plans: of the parts. which: int64 [n], the index of each row's plan. example: int64 [n], within its plan. number:
    int64 [n], of the example in the split. epoch: of one source, in which rows look alike in equal epochs.
    """

    def __init__(self, plans: Sequence[Any], which: np.ndarray, example: np.ndarray, number=None, epoch=None):
        self.plans, self.which, self.example, self.number, self.epoch = plans, which, example, number, epoch

    @functools.cached_property
    def groups(self) -> list[tuple[Any, Any, np.ndarray]]:
        """(plan, index of its rows in arrays [n, ...], their examples) for each plan that has rows."""
        if len(self.plans) == 1:
            return [(self.plans[0], slice(None), self.example)]
        order = np.argsort(self.which.astype(np.uint16), kind="stable")  # 16 bits are sorted by radix
        ends = np.searchsorted(self.which[order], np.arange(len(self.plans) + 1))
        groups = ((plan, order[ends[index] : ends[index + 1]]) for index, plan in enumerate(self.plans))
        return [(plan, rows, self.example[rows]) for plan, rows in groups if len(rows)]

    def gather(self, function: Callable) -> tuple[np.ndarray, ...]:
        """Call function(plan, rows, examples), which returns arrays [m, ...], for each group; join them: [n, ...]."""
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
        """Read `length` values of a field from each row's start (int64 [n]) in its plan's split: [n, length]."""
        return self.gather(lambda plan, rows, _: (plan.part.read(plan.split, field, starts[rows], length),))[0]


def spread(number: int, limit: int, batch_size: int) -> Iterator[np.ndarray]:
    """Yield at most `limit` of `number` examples, evenly spaced, in batches: int64 [n]."""
    count = min(limit, number)
    chosen = np.arange(count) * number // max(count, 1)
    for first in range(0, count, batch_size):
        yield chosen[first : first + batch_size]


def consecutive(number: int, limit: int, batch_size: int) -> Iterator[np.ndarray]:
    """Yield the first of `number` examples, at most `limit`, in batches in which every row continues the same row of
    the batch before: int64 [n]. Only the last row may end before the others."""
    count = min(limit, number)
    steps = -(-count // batch_size)
    runs = np.arange(0, count, max(steps, 1))  # where each row begins
    for step in range(steps):
        yield runs[runs + step < count] + step
