"""Rows of a synthetic task whose answer lies far back, and what a pattern's tables let a question know."""

import dataclasses

import numpy as np

from benchmarks.rows_training import batch_of
from models.attention.patterns.blocks import Blocks, counts
from models.attention.patterns.pattern import blocks_of

VALUES, FILLERS = 16, 4
CLS, MASK, FIRST_VALUE, FIRST_FILLER = 1, 3, 4, 4 + VALUES
VOCABULARY = FIRST_FILLER + FILLERS
ASKED = ("at position 1", "near by", "far")  # where the same value is asked for, in this order
FAR = ASKED.index("far")
GLOBALS = (0, 1)  # the positions of global tokens where rows name them
NEAR = 16  # tokens after the value at most


def back_of(length: int) -> int:
    """How far back the answer lies: 3,000 of 4,096 tokens, in shorter rows as many in proportion."""
    return 3000 * length // 4096


def rows(length: int, number: int, seed: tuple[int, ...], first: int, named: bool) -> dict[str, np.ndarray]:
    """`number` rows in which a value, one of VALUES, stands once among fillers, at a random place from `first` on.

    It is asked for thrice, always by the same [MASK]: at position 1, at most NEAR tokens after the value, and
    `back_of` the length after it.   named: whether the rows name GLOBALS.
    """
    random, back = np.random.default_rng(seed), back_of(length)
    tokens = random.integers(FIRST_FILLER, VOCABULARY, (number, length)).astype(np.int32)
    place = random.integers(first, length - back, number)
    asked = np.stack([np.ones_like(place), place + 1 + random.integers(0, NEAR, number), place + back], 1)
    value = random.integers(FIRST_VALUE, FIRST_VALUE + VALUES, number)
    tokens[:, 0], tokens[np.arange(number), place] = CLS, value
    tokens[np.arange(number)[:, None], asked] = value[:, None]
    batch = batch_of(tokens, asked, MASK)
    return batch | {"globals": np.tile(np.array(GLOBALS, np.int32), (number, 1))} if named else batch


def only(batch: dict[str, np.ndarray], question: int) -> dict[str, np.ndarray]:
    """The rows with one of their questions alone."""
    one = slice(question, question + 1)
    return {name: array[:, one] if name.startswith("prediction_") else array for name, array in batch.items()}


def known(model, length: int, question: int, named: bool) -> np.ndarray:
    """bool[length]: the tokens that a question can know of by the tables of a model's pattern: those that any head sees
    in the last layer, those that any of these sees in the layer before, and so on."""
    blocks, reached = blocks_of(model.pattern, model.depth, model.heads, length), np.arange(length) == question
    for layer in reversed(range(model.depth)):
        seen = np.asarray(counts(_of_layer(blocks, layer), length) > 0).any(0)  # [queries, keys]
        if named:
            seen[list(GLOBALS)], seen[:, list(GLOBALS)] = True, True
        reached = seen[reached].any(0) | reached
    return reached


def _of_layer(blocks: Blocks, layer: int) -> Blocks:
    of = lambda array: None if array is None else array[layer]
    return dataclasses.replace(blocks, drawn=of(blocks.drawn), reach=of(blocks.reach), dilation=of(blocks.dilation))
