"""The fixed set that a model is evaluated on."""

from collections.abc import Iterator

import numpy as np

BLANK = {"next_sentence": -1}  # what a padding row holds where it is not 0: no label


def evaluation_batches(examples, limit: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of the same at most `limit` examples in the same order with the same noise, each exactly
    once.

    The examples are spread evenly over the split and corrupted as in epoch 0. Every batch has
    `examples.batch_size` rows: the last is filled up with rows of zeros (no segment, no weight, no label),
    which count nowhere.
    """
    count = min(limit, examples.number)
    chosen = np.arange(count) * examples.number // max(count, 1)
    for first in range(0, count, examples.batch_size):
        batch = examples.build(0, chosen[first : first + examples.batch_size])
        missing = examples.batch_size - len(chosen[first : first + examples.batch_size])
        yield {name: _filled(array, missing, BLANK.get(name, 0)) for name, array in batch.items()}


def _filled(array, missing, value):
    return np.concatenate([array, np.full((missing, *array.shape[1:]), value, array.dtype)])
