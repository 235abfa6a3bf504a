"""Every epoch is a permutation of its own, found by index."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
