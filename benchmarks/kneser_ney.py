"""What counting achieves: an interpolated Kneser-Ney model of the tokens that decoders are trained on.

Kneser & Ney 1995 in the interpolated form of Chen & Goodman 1998 (section 3): one discount for each order,
n1 / (n1 + 2 n2). It reads held-out documents one after the other, each with its end token, so it has its two tokens of
context everywhere, also where a row of a decoder begins.
"""

from typing import NamedTuple

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.examples.document_stream import DocumentStream, end_token
from data_pipelines.examples.layout import Piece


def held_out_loss(corpus: Corpus, order: int) -> float:
    """Nats a token of the held-out documents with their end tokens."""
    begin = np.full(order - 1, end_token(corpus))  # as before every other document
    train, held_out = (np.concatenate([begin, stream(corpus, split)]) for split in ("train", "heldout"))
    found = probabilities(fit(train, order, corpus.vocab_size), held_out, corpus.vocab_size)
    return float(-np.log(found).mean())


def stream(corpus: Corpus, split: str) -> np.ndarray:
    """All documents, each followed by the end token: i32[tokens]."""
    found = []
    for part in corpus.parts:
        total = int(part.sentences(split)[-1]) + len(part.documents(split)) - 1
        documents = DocumentStream([Piece(part, 0, total)], split, 0, 0)
        found.append(documents.read(np.array([0]), np.array([total]))[0])
    return np.concatenate(found)


class Order(NamedTuple):
    """The grams of one length, as numbers in base vocabulary, ascending, and their contexts, all tokens but the last.

    counts: of a gram, in the highest order how often it occurs, below after how many different tokens.
    totals, kinds: of a context, the sum of its grams' counts and their number.
    """

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    kinds: np.ndarray
    discount: float


def fit(tokens: np.ndarray, order: int, vocab: int) -> list[Order]:
    """Of i[n] tokens, from single tokens up to `order`."""
    grams, counts = np.unique(_numbers(tokens, order, vocab), return_counts=True)
    found = [_order(grams, counts, vocab)]
    for length in range(order - 1, 0, -1):
        grams, counts = np.unique(grams % vocab**length, return_counts=True)  # their first token left out
        found.append(_order(grams, counts, vocab))
    return found[::-1]


def _order(grams: np.ndarray, counts: np.ndarray, vocab: int) -> Order:
    contexts, of = np.unique(grams // vocab, return_inverse=True)
    once, twice = np.sum(counts == 1), np.sum(counts == 2)
    discount = float(once / max(once + 2 * twice, 1))
    return Order(grams, counts, contexts, np.bincount(of, counts), np.bincount(of), discount)


def probabilities(orders: list[Order], tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Of each token after the first len(orders) - 1, given those before it: f64[n - len(orders) + 1]."""
    found = np.full(len(tokens) - len(orders) + 1, 1.0 / vocab)
    for length, order in enumerate(orders, 1):
        grams = _numbers(tokens[len(orders) - length :], length, vocab)
        count = _values(order.grams, order.counts, grams)
        total = _values(order.contexts, order.totals, grams // vocab)
        kinds = _values(order.contexts, order.kinds, grams // vocab)
        seen = (np.maximum(count - order.discount, 0) + order.discount * kinds * found) / np.maximum(total, 1)
        found = np.where(total > 0, seen, found)
    return found


def _numbers(tokens: np.ndarray, length: int, vocab: int) -> np.ndarray:
    """Each `length` consecutive tokens as a number in base vocab, the last token its last digit: i64."""
    number = np.zeros(len(tokens) - length + 1, np.int64)
    for place in range(length):
        number = number * vocab + tokens[place : place + len(number)]
    return number


def _values(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of keys (ascending), 0 where there is no such key."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
