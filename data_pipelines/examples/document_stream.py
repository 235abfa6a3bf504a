"""All documents of a split as one long stream, in an order of its own every epoch, read at any place by index."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples import chunks
from data_pipelines.order import permute


class Order(NamedTuple):
    """One epoch's stream. documents: int64 [documents], which comes first, second, ... starts: int64 [documents + 1],
    where each begins in the stream, then the total. units: int64 [documents + 1], the sentences before each."""

    documents: np.ndarray
    starts: np.ndarray
    units: np.ndarray


class DocumentStream:
    """The documents of a split, each followed by its `end_token`.

    longest: a longer sentence counts as several; None where sentences are not asked for, then a document counts as
    one. total: tokens of the stream, end tokens included.

    Memory: 24 bytes per document (16 and 8 per sentence, with sentences) and 24 per document for each of two or three
    epochs, whose orders are worked out when first read. Raises UserError for a corpus without either token.
    """

    def __init__(self, corpus: Corpus, split: str, seed: int, longest: int | None = None):
        self.corpus, self.split, self.seed = corpus, split, seed
        self.end = end_token(corpus)
        sentences = corpus.sentences(split)
        self._offsets = chunks.document_starts(sentences, corpus.documents(split))
        self._units = chunks.units(sentences, longest, piece=-(-longest // 2)) if longest else self._offsets
        self._first = np.searchsorted(self._units, self._offsets)
        self.total = int(self._offsets[-1]) + len(self._offsets) - 1
        self._orders = {}

    def order(self, epoch: int) -> Order:
        """The stream of an epoch."""
        if epoch not in self._orders:
            number = len(self._offsets) - 1
            documents = permute(self.seed, epoch, number, np.arange(number))
            starts = _cumulated(np.diff(self._offsets)[documents] + 1)
            made = Order(documents, starts, _cumulated(np.diff(self._first)[documents]))
            near = {other: order for other, order in self._orders.items() if abs(other - epoch) == 1}
            self._orders = {**near, epoch: made}  # replaced whole: other threads may be reading it
            return made
        return self._orders[epoch]

    def read(self, order: Order, start: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stretches of the stream, one after the other: tokens int32 [sum of sizes], and the place in the order of
        each one's document, int64. start, size: int64 [stretches], within the stream, of at least one token."""
        starts, end = order.starts, start + size
        first = np.searchsorted(starts, start, "right") - 1
        count = np.searchsorted(starts, end, "left") - first
        stretch = np.repeat(np.arange(len(start)), count)  # of each piece: a document's part of a stretch
        place = first[stretch] + np.arange(len(stretch)) - np.repeat(np.cumsum(count) - count, count)
        begins = np.maximum(starts[place], start[stretch])
        ends = np.minimum(starts[place + 1], end[stretch])
        lengths = ends - begins
        after = np.cumsum(lengths)  # where each piece ends in what is returned
        shift = self._offsets[order.documents[place]] + begins - starts[place] - (after - lengths)
        index = np.arange(after[-1]) + np.repeat(shift, lengths)
        tokens = self.corpus.read(self.split, "tokens", index, 1)[:, 0].astype(np.int32)
        tokens[after[ends == starts[place + 1]] - 1] = self.end
        return tokens, np.repeat(place, lengths)

    def sentences_before(self, order: Order, at: np.ndarray) -> np.ndarray:
        """How many sentences begin before the places `at` (int64 [n], at least 1) of the stream: int64 [n]."""
        place = np.searchsorted(order.starts, at) - 1
        document = order.documents[place]
        # An end token belongs to the sentence before it
        offset = np.minimum(self._offsets[document] + at - order.starts[place], self._offsets[document + 1])
        return order.units[place] + np.searchsorted(self._units, offset) - self._first[document]

    def sentence_start(self, order: Order, number: np.ndarray) -> np.ndarray:
        """Where the sentences of these numbers (int64 [n]) begin in the stream, and the total for their whole
        number: int64 [n]."""
        place = np.searchsorted(order.units, np.minimum(number, order.units[-1] - 1), "right") - 1
        document = order.documents[place]
        offset = self._units[self._first[document] + number - order.units[place]] - self._offsets[document]
        return np.where(number < order.units[-1], order.starts[place] + offset, self.total)


def end_token(corpus: Corpus) -> int:
    """The token that ends a document: the special token 'eod', or 'sep' without one. UserError for neither."""
    for role in ("eod", "sep"):
        if role in corpus.special:
            return corpus.special[role]
    raise UserError(
        f"corpus {corpus.path} has no eod and no sep token, one of which has to end documents; "
        "prepare it with a tokenizer that has one"
    )


def by_epoch(build: Callable, epoch: np.ndarray, example: np.ndarray) -> dict[str, np.ndarray]:
    """build(epoch, examples) for rows (int64 [n]) of which each is of its own epoch: name -> array [n, ...]."""
    first, last = int(epoch.min()), int(epoch.max())
    if first == last:
        return build(first, example)
    batch = {}
    for number in range(first, last + 1):
        here = epoch == number
        if here.any():
            for name, array in build(number, example[here]).items():
                batch.setdefault(name, np.empty((len(example), *array.shape[1:]), array.dtype))[here] = array
    return batch


def _cumulated(sizes):
    return np.append(0, np.cumsum(sizes))
