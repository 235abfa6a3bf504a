"""Every epoch is a permutation of its own, found by index."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines import noise
from data_pipelines.errors import UserError
from data_pipelines.order import permute, permute_each
from tests.data_pipelines.counted import counted


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**9))
def test_positions_are_permuted(number, seed, epoch):
    assert sorted(permute(seed, epoch, number, np.arange(number))) == list(range(number))


@given(st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 99), st.integers(1, 50)), min_size=1, max_size=5))
def test_several_permutations_at_once_are_those_one_by_one(networks):
    which = np.repeat(np.arange(len(networks)), [number for *_, number in networks])[::-1]
    positions = np.concatenate([np.arange(number) for *_, number in reversed(networks)])
    together = permute_each(networks, which, positions)
    for index, network in enumerate(networks):
        here = which == index
        assert together[here].tolist() == permute(*network, positions[here]).tolist()


def test_a_corpus_of_a_trillion_examples_is_permuted_too():
    positions = np.arange(10**12 - 5000, 10**12)
    permuted = permute(3, 0, 10**12, positions)
    assert len(set(permuted.tolist())) == 5000 and permuted.min() >= 0 and permuted.max() < 10**12


def test_the_order_is_another_in_every_epoch_and_for_every_seed():
    positions = np.arange(10_000)
    orders = [permute(seed, epoch, 10_000, positions) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for index, order in enumerate(orders):
        for other in orders[:index] + [positions]:
            assert (order == other).sum() < 12  # 1 on average, Poisson


def test_where_an_example_lands_is_uniform_and_neighbours_part():
    landed = np.stack([permute(5, epoch, 64, np.arange(64)) for epoch in range(2000)])
    for position in (0, 1, 31, 63):
        counts = np.bincount(landed[:, position], minlength=64)
        chi_square = ((counts - 2000 / 64) ** 2 / (2000 / 64)).sum()  # 63 degrees of freedom: deviation 11.2
        assert chi_square < 63 + 5 * 11.2
    distances = np.diff(permute(5, 0, 100_000, np.arange(100_000)))
    assert abs(np.abs(distances).mean() / 100_000 - 1 / 3) < 0.01


def test_the_network_s_halves_do_not_show():
    steps = np.diff(permute(5, 0, 10_000, np.arange(10_000))) % 100  # both halves have 100 values
    chi_square = ((np.bincount(steps, minlength=100) - 100) ** 2 / 100).sum()  # 99 degrees of freedom
    assert chi_square < 99 + 5 * np.sqrt(2 * 99)


def test_an_empty_split_is_an_error_that_names_it():
    with pytest.raises(UserError, match="split 'train' of corpus corpora/none is empty"):
        counted([0], batch_size=4).batch(0, np.arange(4))


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
