"""Whole documents in overlapping rows, for a perplexity in which few tokens see little before them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.examples.chunks import document_starts
from data_pipelines.examples.document_stream import NextTokens, end_token, prefix_tokens
from data_pipelines.examples.layout import Chosen, RowLayout


class Plan(NamedTuple):
    """The documents of a part as they lie there.

    offsets, sizes: of each the first token and how many it has.   rows: int64 [documents + 1], rows before each.
    prefixes: of each the token of a value, None where there are none.
    """

    part: Any
    split: str
    offsets: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray
    end: int
    prefixes: np.ndarray | None

    @property
    def number(self) -> int:
        return int(self.rows[-1])


@dataclass(frozen=True)
class StridedDocuments(NextTokens, RowLayout):
    """Rows of one document each, that begin `stride` tokens after each other.

    A document follows an end token, or in each row its control code, and an end token ends it. Its first row predicts
    `length` tokens, a later one those that no row before it has: weights are 1 there, else 0. A batch holds tokens,
    targets, segments and weights. As in packed documents, the end token before a document is of another one, which with
    `separate` has a segment of its own, and with `restart` `positions` begin with 0 behind it.

    Raises UserError for a stride that is not 1 .. length.
    """

    stride: int = 1
    separate: bool = False
    restart: bool = False

    def __post_init__(self):
        if not 1 <= self.stride <= self.length:
            raise UserError(f"--stride {self.stride}: give a number from 1 to the length of the rows, {self.length}")

    def plan(self, part, split: str, seed: int) -> Plan:
        starts = document_starts(part, split)
        offsets, sizes = starts[:-1], np.diff(starts)
        rows = 1 - (-np.maximum(sizes + 1 - self.length, 0)) // self.stride  # -(-a // b): rounded up
        before = np.append(0, np.cumsum(rows))
        return Plan(part, split, offsets, sizes, before, end_token(part.corpus), prefix_tokens(part, split))

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        window, real, scored, behind = chosen.gather(self._read)
        arrays = {"tokens": window[:, :-1] * real, "targets": window[:, 1:] * real, "segments": real.astype(np.int32)}
        if self.separate:
            arrays["segments"] += real & behind
        if self.restart:
            arrays["positions"] = np.arange(self.length, dtype=np.int32) - behind
        return arrays | {"weights": scored.astype(np.float32)}

    def _read(self, plan: Plan, _, example: np.ndarray) -> tuple[np.ndarray, ...]:
        """The tokens of rows and the one after them int32 [n, length + 1]; which targets there are, which of them the
        row is the first to predict, and which places are behind another document's end token: bool [n, length]."""
        document = np.searchsorted(plan.rows, example, "right") - 1
        row = example - plan.rows[document]
        begin, size = (row * self.stride)[:, None], plan.sizes[document][:, None]
        place = begin - 1 + np.arange(self.length + 1)  # in the document
        starts = plan.offsets[document] + begin[:, 0] - 1
        window = plan.part.read(plan.split, "tokens", starts, self.length + 1).astype(np.int32)
        window[(place == -1) | (place == size)] = plan.end
        behind = (place[:, :1] == -1) & (place[:, :-1] >= 0) & (plan.prefixes is None)
        if plan.prefixes is not None:
            window[:, 0] = plan.prefixes[document]
        target = place[:, 1:]
        before = np.where(row > 0, (row - 1) * self.stride + self.length, 0)[:, None]
        return window, target <= size, (target >= before) & (target <= size), behind
