"""Rows of books as they are, or in which a passage of the row recurs: the same tokens and questions, long and short."""

from typing import NamedTuple

import numpy as np

from benchmarks.rows_training import batch_of
from data_pipelines.corpus import Corpus

LONG, SHORT = 4096, 512  # tokens of the rows that are compared
PASSAGE, BACK = 48, 3000  # tokens at a row's beginning that come again, so much later
AGAIN, ELSEWHERE = PASSAGE // 2, 12  # masked tokens of the passage where it comes again; of other tokens in a piece
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
    tokens: np.ndarray, piece: int, seed: tuple[int, ...], mask: int, back: int = BACK
) -> dict[str, np.ndarray]:
    """Rows i32[n, a multiple of piece] whose first PASSAGE tokens stand again `back` later, of which AGAIN are masked;
    in rows that are too short for that `back` modulo their length later.

    AGAIN + ELSEWHERE of each piece are masked, none of a row's first tokens; those of the passage are the first of its
    piece.
    """
    back %= tokens.shape[1]
    tokens, again = tokens.copy(), slice(back, back + PASSAGE)
    tokens[:, again] = tokens[:, :PASSAGE]
    score = np.random.default_rng(seed).random(tokens.shape)
    highest = np.sort(score[:, again], axis=1)[:, AGAIN - 1 : AGAIN]  # of those that are to be masked
    score[:, again] = np.where(score[:, again] <= highest, score[:, again] - 1, np.inf)
    score[:, :PASSAGE] = np.inf
    return batch_of(tokens, _lowest(score.reshape(len(tokens), -1, piece), AGAIN + ELSEWHERE), mask)


def of_passage() -> slice:
    """Which questions of a row of LONG are those of its passage."""
    first = BACK // SHORT * (AGAIN + ELSEWHERE)
    return slice(first, first + AGAIN)


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
