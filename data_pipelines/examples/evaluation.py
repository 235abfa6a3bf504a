"""The fixed set that a model is evaluated on."""

from collections.abc import Iterator

import numpy as np


def evaluation_batches(examples, limit: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of the same at most `limit` examples in the same order with the same noise, each exactly
    once.

    Which they are the examples say (`fixed`); they are corrupted as in epoch 0. Every batch has
    `examples.batch_size` rows: where there are fewer examples it is filled up with the layout's blank rows (no segment,
    no weight, no label), which count nowhere.
    """
    spec = examples.spec
    for chosen in examples.fixed(limit):
        missing = examples.batch_size - len(chosen)
        batch = examples.build(0, chosen)
        yield {name: np.concatenate([array, spec[name].blank(missing)]) for name, array in batch.items()}


def spread(number: int, limit: int, batch_size: int) -> Iterator[np.ndarray]:
    """At most `limit` of `number` examples, spread evenly over all, in batches: int64 [n]."""
    count = min(limit, number)
    chosen = np.arange(count) * number // max(count, 1)
    for first in range(0, count, batch_size):
        yield chosen[first : first + batch_size]


def consecutive(number: int, limit: int, batch_size: int) -> Iterator[np.ndarray]:
    """The first of `number` examples, at most `limit`, in batches in which every row continues the same row of the
    batch before: int64 [n]. Only the last row may end before the others."""
    count = min(limit, number)
    steps = -(-count // batch_size)
    runs = np.arange(0, count, max(steps, 1))  # where each row begins
    for step in range(steps):
        yield runs[runs + step < count] + step
