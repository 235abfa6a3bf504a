"""Rows of books as they are, or in which a passage of the row recurs: the same tokens and questions, long and short."""

from typing import NamedTuple

import numpy as np

from benchmarks.rows_training import batch_of
from data_pipelines.corpus import Corpus

LONG, SHORT = 4096, 512  # tokens of the rows that are compared
PASSAGE = 24  # tokens at a row's beginning that come again; fewer in rows that are shorter than 64
SPACING = 3  # one in so many tokens of the passage is masked where it comes again, never two side by side
ELSEWHERE = 2  # masked tokens of a piece beside those
HELD_OUT = 0.1  # share of each book, its end


class Books(NamedTuple):
    """Token stretches of all books: for training and held out.   mask: the id of [MASK]."""

    train: list[np.ndarray]
    held_out: list[np.ndarray]
    mask: int


def read(corpus: Corpus) -> Books:
    """Each document is a book, its last tenth held out; those that have less than a row of it are left out."""
    train, held_out = [], []
    for part in corpus.parts:
        ends = part.sentences("train")[part.documents("train")]
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            tokens = np.array(part.array("train", "tokens")[begin:end], np.int32)
            cut = round(len(tokens) * (1 - HELD_OUT))
            if len(tokens) - cut >= LONG:
                train.append(tokens[:cut])
                held_out.append(tokens[cut:])
    return Books(train, held_out, *corpus.require("mask"))


def drawn(books: Books, number: int, length: int, seed: tuple[int, ...]) -> np.ndarray:
    """Stretches for training from anywhere, each place as likely as any other: i32[number, length]."""
    random = np.random.default_rng(seed)
    places = np.array([len(tokens) - length + 1 for tokens in books.train])
    of = random.choice(len(places), number, p=places / places.sum())
    starts = random.integers(0, places[of])
    return np.stack([books.train[book][start : start + length] for book, start in zip(of, starts, strict=True)])


def held_out(books: Books) -> np.ndarray:
    """All long stretches of what is held out, one after the other: i32[n, LONG]."""
    return np.concatenate([tokens[: len(tokens) // LONG * LONG].reshape(-1, LONG) for tokens in books.held_out])


def as_they_are(tokens: np.ndarray, piece: int, seed: tuple[int, ...], mask: int) -> dict[str, np.ndarray]:
    """Rows i32[n, a multiple of piece] with 15% of each piece masked."""
    score = np.random.default_rng(seed).random(tokens.shape).reshape(len(tokens), -1, piece)
    return batch_of(tokens, _lowest(score, round(0.15 * piece)), mask)


def recurring(
    tokens: np.ndarray, piece: int, seed: tuple[int, ...], mask: int, pieces: tuple[int, ...] | None = None
) -> dict[str, np.ndarray]:
    """Rows i32[n, a multiple of piece] whose first tokens, a passage of type 0, stand again once in each of these
    pieces, by default in all, each time at a random place: the rest of a row has type 1.

    In each piece as many tokens are masked, those of the passage before others, and none of a row's first ones.
    """
    number, length = tokens.shape
    random, tokens, size = np.random.default_rng(seed), tokens.copy(), passage(length)
    offsets = np.arange(0, size, SPACING)
    score = random.random(tokens.shape)  # the lowest are masked
    score[:, :size] = np.inf
    for begin in np.arange(length // piece)[slice(None) if pieces is None else list(pieces)] * piece:
        again = random.integers(max(begin, size), begin + piece - size + 1, number)[:, None] + np.arange(size)
        np.put_along_axis(tokens, again, tokens[:, :size], 1)
        np.put_along_axis(score, again, np.inf, 1)
        hidden = offsets + random.integers(0, SPACING - 1, (number, len(offsets)))
        np.put_along_axis(score, np.take_along_axis(again, hidden, 1), -1.0, 1)
    batch = batch_of(tokens, _lowest(score.reshape(number, -1, piece), len(offsets) + ELSEWHERE), mask)
    types = np.broadcast_to(np.arange(length) >= size, tokens.shape).astype(np.int32)
    return batch | {"types": types}


def passage(length: int) -> int:
    """Tokens of the passage of such rows."""
    return min(PASSAGE, 3 * length // 8)


def of_passage(piece: int) -> slice:
    """Which questions of a row of LONG are those of its passage, where it stands again in this piece of SHORT."""
    first = piece * (PASSAGE // SPACING + ELSEWHERE)
    return slice(first, first + PASSAGE // SPACING)


def cut(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tokens and questions in rows of SHORT, in the same order."""
    pieces = batch["tokens"].shape[1] // SHORT
    rows = {name: array.reshape(len(array) * pieces, -1) for name, array in batch.items()}
    rows["prediction_positions"] = rows["prediction_positions"] % SHORT
    return rows


def _lowest(score: np.ndarray, number: int) -> np.ndarray:
    """Positions in the row of the so many lowest of each piece: score [n, pieces, piece] -> [n, pieces * number]."""
    within = np.argsort(score, axis=2)[:, :, :number]
    return (within + np.arange(score.shape[1])[:, None] * score.shape[2]).reshape(len(score), -1)
