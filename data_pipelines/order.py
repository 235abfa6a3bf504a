"""In which order examples come: a global shuffle per epoch, computed by index, with no buffer and no state.

Grain's `index_shuffle` does the same for one index per call, at 3.6 us; 32 rows of 128 tokens are due in 200 us,
so this one permutes all indices of a batch at once.
"""

from math import isqrt

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError

# Four random rounds make a Feistel network with large halves a random permutation (Luby and Rackoff 1988); with halves
# of 100 values a test tells it from one, after six rounds no more
ROUNDS = 6


def schedule(examples, step: int, rows: np.ndarray) -> tuple[int | np.ndarray, np.ndarray]:
    """(epoch, example int64 [n]) of some rows (int64 [n], below batch_size) of one step's global batch.

    Examples are counted endlessly, count = step * batch_size + row: the epoch is count // number, and within an
    epoch every example comes once, in that epoch's own order. The epoch is an int where it is one for all rows,
    else int64 [n]. examples: has seed, batch_size, number, corpus and split. Raises UserError where the split is
    empty.
    """
    if not examples.number:
        raise UserError(f"split '{examples.split}' of corpus {examples.corpus.path} is empty; prepare more text")
    epoch, position = np.divmod(step * examples.batch_size + rows, examples.number)
    first, last = int(epoch.min()), int(epoch.max())
    if first == last:
        return first, permute(examples.seed, first, examples.number, position)
    example = np.empty_like(position)
    for number in range(first, last + 1):
        here = epoch == number
        example[here] = permute(examples.seed, number, examples.number, position[here])
    return epoch, example


def permute(seed: int, epoch: int, number: int, positions: np.ndarray) -> np.ndarray:
    """Where a (seed, epoch)'s permutation of 0 .. number - 1 sends positions: int64 [n] to int64 [n].

    A Feistel network over a * b >= number, a and b near the square root, walked until the value falls below
    number (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2 and 3 together).
    """
    a = isqrt(max(number - 1, 0)) + 1
    b = -(-number // a)
    # -1 - round: no example has such a number, so no row shares its key with a round
    round_keys = [noise.key(seed, epoch, -1 - index) for index in range(ROUNDS)]
    values = _feistel(round_keys, a, b, positions)
    while (outside := values >= number).any():
        values[outside] = _feistel(round_keys, a, b, values[outside])
    return values


def _feistel(round_keys, a, b, values):
    """A permutation of 0 .. a * b - 1 (a and b below 2**31), int64 [n] to int64 [n]."""
    right, left = np.divmod(values, a)
    for index, key in enumerate(round_keys):
        # The round function may be any: only the sum modulo the half's size has to be invertible
        drawn = noise.bits(key, right.astype(np.uint32))
        left, right = right, (left + drawn) % (b if index % 2 else a)
    return left + a * right
