"""The order of examples, computed by index from (seed, epoch) alone, with no buffer and no state.

Each epoch permutes the parts of a corpus and cuts them, end to end, into equal stretches, one for each lane of the
batch. A lane walks through its stretch in windows of a few parts, inside which all examples are shuffled. So a host,
which has some of the lanes, needs only their parts, a window at a time. The lanes belong to the recipe, so a batch does
not depend on the number of hosts. With one lane and one window the shuffle is global.

Grain's `index_shuffle` does the same for one index per call, at 3.6 us; 32 rows of 128 tokens are due in 200 us, so
this module permutes all indices of a batch at once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError

# Four random rounds make a Feistel network with large halves a random permutation (Luby and Rackoff 1988). With halves
# of 100 values a test can still tell the two apart, but not after six rounds
ROUNDS = 6


@dataclass(frozen=True)
class Order:
    """How the parts of a corpus are dealt to a batch. Raises UserError for numbers out of range. A host plans and maps
    lanes x window parts for its own lanes, and keeps copies of as many. With few hosts, many lanes gain nothing."""

    lanes: int = 1  # equal shares of a batch's rows, each of which reads its own parts, so that hosts share the parts
    window: int = 4  # parts that a lane shuffles together

    def __post_init__(self):
        for name in ("lanes", "window"):
            if not 1 <= getattr(self, name) < 2**31:
                raise UserError(f"order.{name}={getattr(self, name)}: must be at least 1 and below 2**31")

    def check(self, name: str, batch_size: int) -> None:
        """Raise UserError if the lanes do not divide the batch size that the setting `name` gives."""
        if batch_size % self.lanes:
            raise UserError(f"{name}={batch_size} is not a multiple of order.lanes={self.lanes}: change one")


ONE_LANE = Order()


class Window(NamedTuple):
    """Pieces of parts that a lane shuffles together. parts: int64 [pieces], ascending; a piece has units begins .. ends
    - 1 of its part. start: units of the lane before. size: its units. key: the permutation's seed."""

    parts: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    start: int
    size: int
    key: int


def stretch(total: int, lane: int, lanes: int) -> tuple[int, int]:
    """Return where a lane's share of an epoch's units begins and ends."""
    return lane * total // lanes, (lane + 1) * total // lanes


def deal(seed: int, epoch: int, sizes: np.ndarray, order: Order, lane: int) -> list[Window]:
    """Return a lane's windows of an epoch, in its order.   sizes: int64 [parts], the units (examples, or tokens of a
    stream) of each part. A part in which one lane's stretch ends and the next one begins is in windows of both."""
    parts = permute(noise.key(seed, "parts"), epoch, len(sizes), np.arange(len(sizes)))
    ends = np.cumsum(sizes[parts])
    begins = ends - sizes[parts]
    low, high = stretch(int(ends[-1]), lane, order.lanes)
    mine = np.flatnonzero(np.minimum(ends, high) > np.maximum(begins, low))
    windows, start = [], 0
    for index, chosen in enumerate(np.array_split(mine, -(-len(mine) // order.window)) if len(mine) else ()):
        chosen = chosen[np.argsort(parts[chosen])]
        first = np.maximum(low - begins[chosen], 0)
        last = np.minimum(high - begins[chosen], sizes[parts[chosen]])
        key = noise.key(seed, "window", lane, index) if lane or index else seed
        windows.append(Window(parts[chosen], first, last, start, int((last - first).sum()), key))
        start += windows[-1].size
    return windows


def distinct(numbers: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return the distinct values among whole numbers (int64 [n]) that lie close together, ascending, and the index
    there of each number: int64 [n]. `np.unique` would sort the numbers."""
    lowest = numbers.min() if len(numbers) else 0
    present = np.bincount(numbers - lowest) > 0
    return (np.flatnonzero(present) + lowest).tolist(), (np.cumsum(present) - 1)[numbers - lowest]


def permute(seed: int, epoch: int, number: int, positions: np.ndarray) -> np.ndarray:
    """Map positions by the permutation of 0 .. number - 1 that (seed, epoch) gives: int64 [n] to int64 [n]. A Feistel
    network over a * b >= number, with a and b near the square root, is applied until the value falls below number
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2 and 3 together)."""
    *keys, a, b = _network(seed, epoch, number)
    values = _feistel(keys, a, b, positions)
    while (outside := values >= number).any():
        values[outside] = _feistel(keys, a, b, values[outside])
    return values


def permute_each(networks: Sequence[tuple[int, int, int]], which: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Like `permute`, with several permutations (seed, epoch, number), of which each position has one (int64 [n])."""
    if len(networks) == 1:
        return permute(*networks[0], positions)
    keys = np.array([_network(*network)[:ROUNDS] for network in networks], np.uint64)
    a, b = np.array([_network(*network)[ROUNDS:] for network in networks]).T
    number = np.array([number for _, _, number in networks])
    values, left = np.array(positions), np.arange(len(positions))
    while len(left):
        network = which[left]
        values[left] = _feistel(keys[network].T, a[network], b[network], values[left])
        left = left[values[left] >= number[network]]
    return values


@functools.lru_cache(4096)
def _network(seed: int, epoch: int, number: int) -> tuple[int, ...]:
    """Return the keys of the rounds, and the sizes a and b of the halves."""
    a = isqrt(max(number - 1, 0)) + 1
    # No example has a negative number, so no row shares its key with a round
    return *(noise.key(seed, epoch, -1 - index) for index in range(ROUNDS)), a, -(-number // a)


def _feistel(round_keys, a, b, values):
    """Permute 0 .. a * b - 1 (a and b below 2**31): int64 [n] to int64 [n]. Keys, a and b: one for all, or [n] each."""
    right, left = np.divmod(values, a)
    for index, key in enumerate(round_keys):
        # Any round function will do: only the sum modulo the half's size must be invertible
        drawn = noise.each(key, right.astype(np.uint32))
        left, right = right, (left + drawn) % (b if index % 2 else a)
    return left + a * right
