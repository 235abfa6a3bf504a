"""The counter hash behaves like independent uniform draws, along a row, across rows, epochs and seeds."""

import numpy as np
import pytest

from data_pipelines import noise

ONE, OTHER = "masked tokens", "what masked tokens become"
KEYS = noise.key(1, 0, np.arange(2000))
DRAWS = noise.bits(KEYS, noise.counters(ONE, 500))  # uint32 [2000, 500]


def test_an_int_and_an_array_are_hashed_alike():
    rows = np.arange(5)
    expected = [noise.key(7, 3, row) for row in range(5)]
    assert noise.key(7, 3, rows).tolist() == expected
    assert noise.key(7, np.full(5, 3), rows).tolist() == expected
    counters = noise.counters(ONE, 4)
    assert noise.bits(noise.key(7, 3, rows), counters)[1].tolist() == noise.bits(expected[1], counters).tolist()


def test_every_number_in_a_key_counts():
    keys = [noise.key(*numbers) for numbers in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 2), (-1, 2))]
    assert len(set(keys)) == len(keys)


def test_all_256_values_of_every_byte_are_equally_frequent():
    for shift in (0, 8, 16, 24):
        counts = np.bincount(((DRAWS >> shift) & 255).ravel(), minlength=256)
        expected = DRAWS.size / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()  # 255 degrees of freedom: deviation 22.6
        assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6


@pytest.mark.parametrize("neighbour", ["next counter", "next row", "next epoch", "next seed", "next stream"])
def test_neighbours_are_independent(neighbour):
    rows = np.arange(2000)
    other = {
        "next counter": lambda: np.roll(DRAWS, 1, axis=1),
        "next row": lambda: np.roll(DRAWS, 1, axis=0),
        "next epoch": lambda: noise.bits(noise.key(1, 1, rows), noise.counters(ONE, 500)),
        "next seed": lambda: noise.bits(noise.key(2, 0, rows), noise.counters(ONE, 500)),
        "next stream": lambda: noise.bits(KEYS, noise.counters(OTHER, 500)),
    }[neighbour]()
    correlation = np.corrcoef(DRAWS.ravel(), other.ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(DRAWS.size)
    differing = np.bitwise_count(DRAWS ^ other).mean()  # 16 of 32 bits; deviation of the mean sqrt(8 / draws)
    assert abs(differing - 16) < 5 * np.sqrt(8 / DRAWS.size)


def test_below_is_uniform_and_stays_below():
    for bound in (1, 2, 7, 1000):
        counts = np.bincount(noise.below(DRAWS, bound).ravel(), minlength=bound)
        assert len(counts) == bound
        assert np.abs(counts - DRAWS.size / bound).max() < 6 * np.sqrt(DRAWS.size / bound)
