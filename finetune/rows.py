"""Rows of a task, all in memory: a finetuning run reads these instead of a corpus."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from data_pipelines.corpus import Checks
from data_pipelines.examples.layout import Chosen, Feature, RowLayout
from data_pipelines.tokenizers import stored

MULTIPLE = 8  # row lengths are multiples of this
SHAPES = 4  # largest number of row lengths to compile programs for


class Rows(NamedTuple):
    """Ragged rows, with the tokens of all rows concatenated.
    tokens, types: i32[total].   starts: i64[n + 1].   columns: name -> [n, ...].   of_tokens: name -> [total, ...]."""

    tokens: np.ndarray
    types: np.ndarray
    starts: np.ndarray
    columns: Mapping[str, np.ndarray]
    of_tokens: Mapping[str, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """Row lengths i64[n], in tokens."""
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1


class Row(NamedTuple):
    """types: None for zeros.   place: position of the token that a head reads for the whole row."""

    tokens: Sequence[int]
    types: Sequence[int] | None = None
    place: int = 0


def joined(
    rows: Sequence, columns: Mapping[str, np.ndarray] = {}, of_tokens: Mapping[str, Sequence[np.ndarray]] = {}
) -> Rows:
    """Join rows, which have tokens and types like `Row`."""
    flat = lambda lists: np.concatenate([np.asarray(one, np.int32) for one in lists] or [np.zeros(0, np.int32)])
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
    types = flat(np.zeros(len(row.tokens)) if row.types is None else row.types for row in rows)
    return Rows(flat(row.tokens for row in rows), types, starts, columns, {k: flat(v) for k, v in of_tokens.items()})


class RowsOfBucket(NamedTuple):
    """rows: i64[number], indices of a split's rows in the bucket."""

    all: Rows
    rows: np.ndarray

    @property
    def number(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class TaskRows(RowLayout):
    """Layout of rows longer than `above` and no longer than `length`, padded to `length`.

    A batch has tokens, types and segments i32[length], with segments 1 at tokens and 0 at padding, and the columns.

    columns, of_tokens: (name, feature of a row or of a token) each.   texts: number of texts in a row, for `of_tokens`
    with several.
    """

    above: int
    columns: tuple[tuple[str, Feature], ...]
    of_tokens: tuple[tuple[str, Feature], ...] = ()
    texts: int = 1

    @property
    def tokens(self):
        return self.length * self.texts

    @property
    def spec(self):
        of_row = Feature((self.length,))
        per_token = {name: one._replace(shape=(self.length, *one.shape)) for name, one in self.of_tokens}
        return dict.fromkeys(("tokens", "types", "segments"), of_row) | dict(self.columns) | per_token

    def examples_of(self, sizes):
        return sizes["documents"]

    def plan(self, part, split, seed):
        rows = part.rows[split]
        return RowsOfBucket(rows, np.flatnonzero((rows.lengths > self.above) & (rows.lengths <= self.length)))

    def build(self, chosen: Chosen, keys):
        (plan,) = chosen.plans
        return self.padded(plan.all, plan.rows[chosen.example])

    def padded(self, rows: Rows, which: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows with indices `which` i64[n] as arrays of a batch [n, ...]."""
        begin, place = rows.starts[which][:, None], np.arange(self.length)
        is_token = place < rows.lengths[which][:, None]
        at = np.where(is_token, begin + place, 0)

        def per_token(values, fill):
            return np.where(is_token.reshape(*is_token.shape, *(1,) * (values.ndim - 1)), values[at], fill)

        batch = {"tokens": rows.tokens[at] * is_token, "types": rows.types[at] * is_token, "segments": is_token}
        batch = {name: array.astype(np.int32) for name, array in batch.items()}
        batch |= {name: rows.columns[name][which].astype(one.dtype) for name, one in self.columns}
        of_tokens = rows.of_tokens
        return batch | {name: per_token(of_tokens[name], one.fill).astype(one.dtype) for name, one in self.of_tokens}


def buckets(lengths: np.ndarray, most: int = SHAPES, longest: int = 2**31 - 1) -> list[int]:
    """Return at most `most` lengths, ascending, such that padding rows up to them takes the fewest tokens. Each is a
    multiple of MULTIPLE, or `longest`."""
    rounded, counts = np.unique(np.minimum(-(-lengths // MULTIPLE) * MULTIPLE, longest), return_counts=True)
    before = np.cumsum([0, *counts])  # number of rows shorter than each length
    cost, ends = [np.concatenate([[0.0], np.full(len(rounded), np.inf)])], []
    for _ in range(min(most, len(rounded))):
        # [end, begin]: rows in between are padded to the longest of them
        padded = (before[1:, None] - before[None, :-1]) * rounded[:, None] + cost[-1][None, :-1]
        padded = np.where(np.tri(len(rounded), dtype=bool), padded, np.inf)
        ends.append(padded.argmin(1))
        cost.append(np.concatenate([[np.inf], padded.min(1)]))
    best = min(range(1, len(cost)), key=lambda used: cost[used][-1])
    found, end = [], len(rounded)
    for used in range(best, 0, -1):
        found.append(int(rounded[end - 1]))
        end = int(ends[used - 1][end - 1])
    return found[::-1]


def with_rows(ends: Sequence[int], lengths: np.ndarray, least: int) -> list[int]:
    """Merge buckets with fewer than `least` rows, which might get no step, into the next longer bucket. If the longest
    bucket has too few rows, the next shorter one joins it."""
    kept = [0]
    for end in ends:
        if np.sum((lengths > kept[-1]) & (lengths <= end)) >= least:
            kept.append(end)
    return [*kept[1:-1], ends[-1]]


class TaskData:
    """The rows of a task's files, with the attributes of a `Corpus` that training reads.

    rows: 'train' and 'heldout' -> Rows.   source: name of the training file.   vocab_size: the model's.
    right: the labels of held-out examples, hashed with the rows, which may not contain them.
    """

    def __init__(self, rows: Mapping[str, Rows], source: str, tokenizer_path: Path, vocab_size: int, right: str):
        self.rows, self.tokenizer_path, self.vocab_size = dict(rows), tokenizer_path, vocab_size
        self.special = stored.load(tokenizer_path).special
        self.path = self.source = source
        hashed = hashlib.sha256(right.encode())
        for of_split in self.rows.values():
            for array in (*of_split[:3], *of_split.columns.values(), *of_split.of_tokens.values()):
                hashed.update(np.ascontiguousarray(array).view(np.uint8))
        self.fingerprint = hashed.hexdigest()
        self.manifest, self.checks = {"fingerprint": self.fingerprint}, Checks(None)
        self.sizes = {split: {"documents": len(one), "tokens": len(one.tokens)} for split, one in self.rows.items()}
        self.entry = SimpleNamespace(files={}, fingerprint=self.fingerprint)
        self.parts, self.index, self.fields = (self,), 0, {}

    def size(self, split: str) -> Mapping[str, int]:
        return self.sizes[split]
