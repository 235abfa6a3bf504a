"""Rows whose next tokens are predicted: packed documents, streams, documents in strides, inputs with their targets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.examples.chunks import document_starts
from data_pipelines.examples.document_stream import DocumentStream, end_token, prefix_tokens, whole
from data_pipelines.examples.layout import Chosen, Feature, Layout, RowLayout, StreamLayout

NUMBERS = 2**31 - 1  # segment numbers that fit int32


class NextTokens(Layout):
    """Base of next-token layouts, of documents that an end token ends. A batch holds tokens, targets (the next token),
    segments (0 if there is none), weights and, with `restart`, `positions` that begin with 0 in every document.

    separate: segments number the documents in the row, from 1 on, so that attention stays within one; else all are 1.
    """

    separate = restart = False

    @property
    def spec(self) -> dict[str, Feature]:
        names = ("tokens", "targets", "segments", *(("positions",) if self.restart else ()))
        return dict.fromkeys(names, Feature((self.length,))) | {"weights": Feature((self.length,), np.float32)}

    def check(self, corpus):
        end_token(corpus)

    def arrays(
        self, window: np.ndarray, real: np.ndarray, starts: np.ndarray | None, predicted: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the batch of rows. window: each row and the token after it, int32 [n, length + 1]. real: the tokens
        that have a next one; starts: those that begin a document inside the row, None if none do; predicted: those
        whose next one is a target; bool [n, length] each."""
        segments = real.astype(np.int32)
        arrays = {"tokens": window[:, :-1] * segments, "targets": window[:, 1:] * segments, "segments": segments}
        if self.separate:
            segments *= 1 + np.cumsum(starts, axis=1, dtype=np.int32)
        if self.restart:
            column = np.arange(self.length, dtype=np.int32)
            arrays["positions"] = column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)
        return arrays | {"weights": predicted.astype(np.float32)}


class DocumentsPlan(NamedTuple):
    """The documents of a part one after the other, in an order by the seed; rows are cut from them."""

    stream: DocumentStream
    number: int  # examples per epoch


@dataclass(frozen=True)
class PackedDocuments(NextTokens, RowLayout):
    """Documents packed to full length: rows of `length` tokens of a part's documents, without padding.

    Weights are 1, and 0 after the last document of a part; the last target of a row is the next row's first token.

    If the corpus has control codes (or another value, as years), each document begins with its code, and so does each
    row that continues a document; its first target is then predicted from the code alone (Keskar et al. 2019). Codes
    are targets like other tokens, except those that begin a row; every other token is a target once.
    """

    prefixed = True

    separate: bool = False
    restart: bool = False

    def plan(self, part, split: str, seed: int) -> DocumentsPlan:
        stream = DocumentStream([whole(part, split)], split, seed, 0, prefixes=prefix_tokens(part, split))
        targets = max(stream.total - (stream.prefixes is None), 0)
        return DocumentsPlan(stream, -(-targets // self.length))

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        window, document = chosen.gather(self._read)
        real, starts = document[:, 1:] >= 0, np.zeros((len(document), self.length), bool)
        starts[:, 1:] = document[:, 1:-1] != document[:, :-2]
        return self.arrays(window, real, starts, real)

    def _read(self, plan: DocumentsPlan, _, example: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Like `DocumentStream.rows`, with a document's code before a row that continues it."""
        window, document = plan.stream.rows(example, self.length)
        if plan.stream.prefixes is None:
            return window, document
        # A row that begins with a document's code has one target less: the token after it begins the next row
        begins = plan.stream.begins(example * self.length)
        document[begins, -1] = -1
        lead = plan.stream.prefixes[document[:, 0]]
        window = np.where(begins[:, None], window, np.insert(window[:, :-1], 0, lead, 1))
        document = np.where(begins[:, None], document, np.insert(document[:, :-1], 0, document[:, 0], 1))
        return window, document


@dataclass(frozen=True)
class ContiguousStreams(NextTokens, StreamLayout):
    """Streams of text, for models with a memory: row b of a step continues row b of the step before, as in
    Transformer-XL's batches (Dai et al. 2019, section 3.2), but with the documents in a new order every epoch.

    A stream is cut into pieces of `length` tokens, its examples; row b has the b-th of equal consecutive runs of them.
    So every token comes once, except fewer than rows * length at the stream's end. Weights are 1. Segments are 1 or, if
    memory is to be `reset` where documents end, so that nothing of an earlier one is seen, the documents' running
    number. After the stream's end both are 0.
    """

    reset: bool = False

    def number(self, total: int) -> int:
        """The last example may be shorter."""
        return -(-max(total - 1, 0) // self.length)  # the first token is no target

    def steps(self, total: int, rows: int) -> int:
        return max(total - 1, 0) // (rows * self.length)

    def plan(self, pieces, split: str, key: int, epoch: int, first: int = 0) -> DocumentStream:
        return DocumentStream(pieces, split, key, epoch, first=first)

    def build(self, plan: DocumentStream, example: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
        window, place = plan.rows(example, self.length)
        real = place[:, 1:] >= 0
        arrays = self.arrays(window, real, None, real)
        if self.reset:
            # Numbers continue over streams: if one came again, the memory would be of another text
            arrays["segments"] *= (1 + (plan.first + place) % NUMBERS).astype(np.int32)[:, :-1]
        return arrays


class StridesPlan(NamedTuple):
    """The documents of a part in stored order.

    offsets, sizes: each document's first token, and its number of tokens.   rows: int64 [documents + 1], rows before
    each document.   prefixes: int32 [documents], the token of each document's value; None if there is none.
    number: of rows.
    """

    part: Any
    split: str
    offsets: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray
    prefixes: np.ndarray | None
    number: int


@dataclass(frozen=True)
class StridedDocuments(NextTokens, RowLayout):
    """Rows of one document each, `stride` tokens apart, for a perplexity in which few tokens have little context.

    A document follows an end token or, in each row, its control code, and an end token ends it. Its first row predicts
    `length` tokens, later rows the tokens that no earlier row predicts: weights are 1 there, else 0. As in packed
    documents, the end token before a document belongs to another one.

    Raises UserError for a stride that is not 1 .. length.
    """

    prefixed = True

    stride: int = 1
    separate: bool = False
    restart: bool = False

    def __post_init__(self):
        if not 1 <= self.stride <= self.length:
            raise UserError(f"--stride {self.stride}: give a number from 1 to the length of the rows, {self.length}")

    def plan(self, part, split: str, seed: int) -> StridesPlan:
        starts = document_starts(part, split)
        offsets, sizes = starts[:-1], np.diff(starts)
        rows = 1 - (-np.maximum(sizes + 1 - self.length, 0)) // self.stride  # -(-a // b): rounded up
        before = np.append(0, np.cumsum(rows))
        return StridesPlan(part, split, offsets, sizes, before, prefix_tokens(part, split), int(before[-1]))

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        return self.arrays(*chosen.gather(self._read))

    def _read(self, plan: StridesPlan, _, example: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the arguments of `arrays`."""
        document = np.searchsorted(plan.rows, example, "right") - 1
        row = example - plan.rows[document]
        begin, size = (row * self.stride)[:, None], plan.sizes[document][:, None]
        place = begin - 1 + np.arange(self.length + 1)  # in the document
        first = plan.offsets[document] + begin[:, 0] - 1
        window = plan.part.read(plan.split, "tokens", first, self.length + 1).astype(np.int32)
        window[(place == -1) | (place == size)] = end_token(plan.part.corpus)
        starts = (place[:, :-1] == 0) & (place[:, :1] == -1) & (plan.prefixes is None)
        if plan.prefixes is not None:
            window[:, 0] = plan.prefixes[document]
        real = place[:, 1:] <= size
        before = np.where(row > 0, (row - 1) * self.stride + self.length, 0)[:, None]
        return window, real, starts, real & (place[:, 1:] >= before)


class PairsPlan(NamedTuple):
    """The documents of a part.   input_begins, target_begins, inputs, targets: int64 [documents], where the input and
    the target begin, and their tokens.   prefixes: as in `StridesPlan`.   number: of documents."""

    part: Any
    split: str
    input_begins: np.ndarray
    target_begins: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    prefixes: np.ndarray | None
    number: int


class PairLayout(RowLayout):
    """Base of layouts with one document per row, an input and its target, of two segments in the corpus's order."""

    prefixed = True

    def examples_of(self, sizes):
        return sizes["documents"]

    def check(self, corpus):
        super().check(corpus)
        segments = corpus.fields["segments"].values if "segments" in corpus.fields else ("text",)
        if len(segments) != 2:
            raise UserError(
                f"corpus {corpus.path} has documents of {', '.join(segments)}, where rows of input and target need two "
                "segments: prepare it with --field INPUT --field TARGET, or of a parallel: source"
            )

    def plan(self, part, split: str, seed: int) -> PairsPlan:
        sentences, documents = part.sentences(split), part.documents(split)
        is_target = part.column(split, "segments") == 1
        before = np.append(0, np.cumsum(np.diff(sentences) * is_target))[documents]
        offsets, targets = sentences[documents], np.diff(before)
        begins, inputs = offsets[:-1], np.diff(offsets) - targets
        turned = is_target[documents[:-1]]  # a source added later may name its fields in another order
        places = begins + np.where(turned, targets, 0), begins + np.where(turned, 0, inputs)
        return PairsPlan(part, split, *places, inputs, targets, prefix_tokens(part, split), len(inputs))


@dataclass(frozen=True)
class InputTarget(PairLayout, NextTokens):
    """Documents of two segments, an input and its target, as texts for a decoder: translation, summaries. Radford et
    al. 2018 (section 3.3) put a delimiter between two texts; so a summary is learnt as a continuation.

    A row is one document: its value's token, if it has one, the input, a delimiter, the target, an end token, padding.

    The delimiter is the corpus's 'sep' if 'eod' ends documents; otherwise it is the end token too. If a row is too
    short, the end of the input is cut, then the end of the target. Weights are 1 where a token of the document is
    predicted, or of its target alone; with `auxiliary`, auxiliary_weights are 1 at its other tokens.
    """

    least = 2

    target_alone: bool
    auxiliary: bool

    @property
    def spec(self) -> dict[str, Feature]:
        spec = super().spec
        return spec | ({"auxiliary_weights": spec["weights"]} if self.auxiliary else {})

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        row, real, of_target = chosen.gather(self._read)
        predicted = real & of_target if self.target_alone else real
        arrays = self.arrays(row, real, None, predicted)
        if self.auxiliary:
            arrays["auxiliary_weights"] = (real & ~predicted).astype(np.float32)
        return arrays

    def _read(self, plan: PairsPlan, _, example: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows with the token after them, int32 [n, length + 1]; which of these exist, and which are targets."""
        place, end = np.arange(self.length + 1), end_token(plan.part.corpus)
        inputs, targets = plan.inputs[example], plan.targets[example]
        lead = int(plan.prefixes is not None)
        kept = np.clip(self.length - 1 - lead - targets, 0, inputs)
        delimiter = (lead + kept)[:, None]
        of_input = plan.input_begins[example][:, None] + place - lead
        of_target = plan.target_begins[example][:, None] + place - delimiter - 1
        index = np.where(place < delimiter, of_input, of_target)
        row = plan.part.read(plan.split, "tokens", index.ravel(), 1)[:, 0].reshape(index.shape).astype(np.int32)
        last = delimiter + 1 + targets[:, None]
        row[place == delimiter] = delimiter_token(plan.part.corpus.special)
        row[place == last] = end
        if lead:
            row[:, 0] = plan.prefixes[example]
        return row, place[1:] <= last, place[1:] > delimiter


def delimiter_token(special: Mapping[str, int]) -> int:
    """Return the token between an input and its target, of a vocabulary with a token that ends documents."""
    return special["sep" if "sep" in special else "eod"]
