"""In which order examples come: a global shuffle per epoch, computed by index, with no buffer and no state.

Grain's `index_shuffle` does the same for one index per call at 3.6 us; a batch of 256 short rows is due in
1.6 ms, so this one permutes a batch of indices at once.
"""

from math import isqrt

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError

ROUNDS = 4  # enough for a Feistel network with random rounds to pass as a random permutation (Luby and Rackoff 1988)


def schedule(examples, step, rows):
    """(epoch int64 [n], example int64 [n]) of some rows (int64 [n], below batch_size) of one step's global
    batch.

    Examples are counted endlessly, count = step * batch_size + row: the epoch is count // number, and within
    an epoch every example comes once, in that epoch's own order. examples: has seed, batch_size, number,
    corpus and split. Raises UserError where there is no example at all.
    """
    if not examples.number:
        raise UserError(f"split {examples.split!r} of corpus {examples.corpus.path} is empty; prepare more text")
    count = step * examples.batch_size + np.asarray(rows, np.int64)
    epoch, position = np.divmod(count, examples.number)
    return epoch, permute(examples.seed, epoch, examples.number, position)


def permute(seed, epoch, number, positions):
    """Where a (seed, epoch)'s permutation of 0 .. number - 1 sends positions: int64 [n] -> int64 [n].

    epoch: integer or int64 [n]. The permutation is a Feistel network over a * b >= number, a and b near the
    square root, walked until the value falls below number (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains", methods 2 and 3 together).
    """
    a = isqrt(max(number - 1, 0)) + 1
    b = -(-number // a)
    epoch = np.atleast_1d(epoch)
    if (epoch == epoch[0]).all():
        epoch = epoch[:1]  # one key for all rows: cheaper
    multiples = np.arange(2, ROUNDS + 2, dtype=np.uint64)[:, None]  # from 2: keys of rows begin at key + GAMMA
    round_keys = noise.mix64(noise.keys(seed, epoch) + noise.GAMMA * multiples)  # [ROUNDS, n or 1]
    values = _feistel(round_keys, a, b, np.asarray(positions, np.int64))
    while (outside := values >= number).any():
        walking = round_keys if len(epoch) == 1 else round_keys[:, outside]
        values[outside] = _feistel(walking, a, b, values[outside])
    return values


def _feistel(round_keys, a, b, values):
    """A permutation of 0 .. a * b - 1 (a * b below 2**62), int64 [n] -> int64 [n]."""
    right, left = np.divmod(values, a)
    for number, key in enumerate(round_keys):
        # The round function may be any: only the sum modulo the half's size has to be invertible
        mixed = (right.view(np.uint64) ^ key) * noise.GAMMA
        mixed ^= mixed >> 32
        mixed *= noise.GAMMA
        mixed >>= 32
        mixed += left.view(np.uint64)
        left, right = right, (mixed % (b if number % 2 else a)).view(np.int64)
    return left + a * right
