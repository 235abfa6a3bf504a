"""Finds the attention heads that best predict the relations of dependency trees (Clark et al. 2019, section 4.2)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.formats.conll import Options
from finetune.files import FORMS
from finetune.inside import attention_shares, looked
from finetune.rows import joined
from finetune.sentences import NONE, Pieces, rows_of, sentences
from pretrain.training.opened import Opened

HEAD, RELATION = 7, 8  # columns of CoNLL-U
TOKENS = 1 << 10  # in a batch, small as each has the attention of all heads
DIRECTIONS = "dependent", "head"  # which of the two words attends to the other
ALL = "all"  # stands for all relations


class Tree(NamedTuple):
    """heads: i64[words], index of each word's head, NONE for the root.   relations: to the heads."""

    words: tuple[str, ...]
    heads: np.ndarray
    relations: tuple[str, ...]


class Row(NamedTuple):
    """tree: its index.   dependents, heads: i64[n], pairs of words that are both in this row."""

    tree: int
    pieces: Pieces
    dependents: np.ndarray
    heads: np.ndarray


def trees(file: Path) -> list[Tree]:
    """Return the trees of a CoNLL-U file. UserError with file and line if malformed."""
    if file.suffix in FORMS:
        raise UserError(f"--trees {file}: is not a CoNLL-U file; give one")
    read = [sentences(file, Options(label_column=column), ("", "")) for column in (HEAD, RELATION)]
    found = []
    for sentence, relations in zip(*read, strict=True):
        known = {str(number): number - 1 for number in range(1, len(sentence.words) + 1)} | {"0": NONE}
        for word, head in enumerate(sentence.label):
            if head not in known:
                raise UserError(f"{sentence.where_of(word)}: head {head!r} is not a word of the sentence; correct it")
        found.append(Tree(sentence.words, np.array([known[head] for head in sentence.label]), relations.label))
    return found


def rows_of_trees(opened: Opened, given: Sequence[Tree], length: int) -> list[Row]:
    """Return rows of at most `length` tokens that contain dependents together with their heads."""
    rows, found = rows_of(opened.tokenizer, [tree.words for tree in given], length), []
    for number, tree in enumerate(given):
        for pieces in rows[number]:
            words = np.unique(pieces.owners[pieces.owners != NONE])
            dependents = words[np.isin(tree.heads[words], words)]
            if len(dependents):
                found.append(Row(number, pieces, dependents, tree.heads[dependents]))
    return found


def between_words(shares: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert attention between tokens f32[..., length, length] to attention between words [..., words, words]: the sum
    over pieces attended to, the mean over attending pieces (section 4.1). Also return the word indices i64[words].
    owners: i32[length], the word of each token."""
    words = np.unique(owners[owners != NONE])
    is_of = (owners[:, None] == words).astype(np.float32)
    return (is_of / is_of.sum(0)).T @ shares @ is_of, words


def hits(opened: Opened, rows: Sequence[Row]) -> list[np.ndarray]:
    """Return for each row bool[2, depth, heads, n]: whether a dependent's head is the other word with the most
    attention from the dependent (first) or to it (second)."""
    found: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for numbers, shares in looked(opened, joined([row.pieces for row in rows]), attention_shares, TOKENS):
        for at, number in enumerate(numbers):
            row, length = rows[number], len(rows[number].pieces.tokens)
            of_words, words = between_words(shares[:, at, :, :length, :length], row.pieces.owners)
            of_words[..., np.arange(len(words)), np.arange(len(words))] = -1
            dependents = np.searchsorted(words, row.dependents)
            both = np.stack([of_words, of_words.swapaxes(-1, -2)])[..., dependents, :]
            found[number] = words[both.argmax(-1)] == row.heads
    return found


def best_heads(opened: Opened, given: Sequence[Tree], length: int, least: int) -> tuple[list[dict], dict[str, int]]:
    """Return a table row for all relations and for each with at least `least` words, the most frequent first, and the
    number of words left out by reason.
    A table row has the accuracy of the best attention head and that of the best fixed offset, in words, from dependent
    to head. Both are chosen on these trees.   UserError if no word is in a row with its head."""
    rows = rows_of_trees(opened, given, length)
    if not rows:
        cure = f"give another file, or raise --length {length}"
        raise UserError(f"--trees: no word is in the same row as its head; {cure}")
    right = np.concatenate(hits(opened, rows), axis=-1)
    offsets = np.concatenate([row.heads - row.dependents for row in rows])
    relations = np.array([given[row.tree].relations[word] for row in rows for word in row.dependents])
    names, counts = np.unique(relations, return_counts=True)
    lines = []
    for name in (ALL, *names[np.argsort(-counts, kind="stable")]):
        chosen = relations == name if name != ALL else np.full(len(relations), True)
        if chosen.sum() >= least:
            line = {"relation": str(name), "words": int(chosen.sum())}
            lines.append(line | _best(right[..., chosen], offsets[chosen]))
    cut = sum(int((tree.heads != NONE).sum()) for tree in given) - len(relations)
    rare = int(counts[counts < least].sum())
    return lines, {f"of relations with fewer than --cases {least}": rare, "not in the same row as their heads": cut}


def _best(right: np.ndarray, offsets: np.ndarray) -> dict[str, str | int | float]:
    """Return the best head and offset.   right: bool[2, depth, heads, n]."""
    accuracy = right.mean(-1)
    looks, layer, head = np.unravel_index(accuracy.argmax(), accuracy.shape)
    known, counts = np.unique(offsets, return_counts=True)
    return {
        "layer": int(layer) + 1,
        "head": int(head) + 1,
        "looks": DIRECTIONS[looks],
        "accuracy": float(accuracy.max()),
        "offset": int(known[counts.argmax()]),
        "accuracy of offset": float(counts.max() / len(offsets)),
    }
