"""Noise is a hash of counters, epochs are permutations, and parts are dealt to lanes: each example comes once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines import noise
from data_pipelines.batches import HELD_OUT, KEPT
from data_pipelines.errors import UserError
from data_pipelines.order import Order, deal, permute, permute_each
from tests.data_pipelines.counted import SEED, counted


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


ONE, OTHER = range(2)
KEYS = noise.key(1, 0, np.arange(2000))
DRAWS = noise.bits(KEYS, noise.counters(ONE, 500))  # uint32 [2000, 500]


def test_every_number_in_a_key_counts():
    keys = [noise.key(*numbers) for numbers in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 2), (-1, 2))]
    assert len(set(keys)) == len(keys)


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


def test_streams_have_counters_of_their_own():
    found = [noise.counters(stream, 100_000).tolist() for stream in range(3)]
    assert len({*found[0], *found[1], *found[2]}) == 300_000
    assert [counters[0] >> 24 for counters in found] == [0, 1, 2]


def test_below_is_uniform_and_stays_below():
    for bound in (1, 2, 7, 1000):
        counts = np.bincount(noise.below(DRAWS, bound).ravel(), minlength=bound)
        assert len(counts) == bound
        assert np.abs(counts - DRAWS.size / bound).max() < 6 * np.sqrt(DRAWS.size / bound)


UNEQUAL = [13, 40, 7, 1, 90, 22, 35, 5, 61, 18]


def seen(examples, steps):
    """epoch -> how often each example comes in it, over all rows of some steps."""
    epochs = {}
    for step in steps:
        batch = examples.batch(step, np.arange(examples.batch_size))
        for epoch, example in zip(batch["epoch"].tolist(), batch["example"].tolist(), strict=True):
            epochs.setdefault(epoch, Counter())[example] += 1
    return epochs


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 8),
    st.sampled_from([1, 2, 4, 8]), st.integers(1, 5), st.integers(1, 3),
)  # fmt: skip
def test_every_example_comes_once_in_every_epoch(sizes, lanes, window, rows):
    examples = counted(sizes, lanes * rows, lanes, window)
    epochs = seen(examples, range(2 * -(-sum(sizes) // (lanes * rows)) + lanes))
    for epoch in (0, 1):
        assert epochs[epoch] == Counter(range(sum(sizes)))


def test_one_lane_with_one_window_is_a_shuffle_of_the_whole_split_whatever_its_parts():
    batches = [
        counted(sizes, 16, window=10).batch(step, np.arange(16)) for sizes in (UNEQUAL, [292]) for step in (0, 20)
    ]
    for of_parts, whole in zip(batches[:2], batches[2:], strict=True):
        assert of_parts["example"].tolist() == whole["example"].tolist()
        assert of_parts["epoch"].tolist() == whole["epoch"].tolist()
    assert batches[0]["example"].tolist() == permute(SEED, 0, 292, np.arange(16)).tolist()


def test_a_lane_reads_the_parts_of_its_window_alone_and_shuffles_them():
    sizes = [50] * 12
    examples = counted(sizes, 4, lanes=2, window=3)
    for lane in range(2):
        rows = np.arange(2) + 2 * lane
        parts = np.concatenate([examples.batch(step, rows)["part"] for step in range(150)])
        first, second = set(parts[:150].tolist()), set(parts[150:].tolist())
        assert len(first) == len(second) == 3 and not first & second
        assert set(parts[:30].tolist()) == first


def test_no_two_windows_are_shuffled_alike():
    examples = counted([50] * 8, 100, lanes=2, window=2)
    batches = [examples.batch(step, np.arange(100)) for step in range(2)]
    batches = [{name: array[at : at + 50] for name, array in batch.items()} for batch in batches for at in (0, 50)]
    places = [50 * (batch["part"] == batch["part"].max()) + batch["example"] % 50 for batch in batches]
    assert len({place.tobytes() for place in places}) == 4


def test_every_epoch_deals_the_parts_anew():
    dealt = [
        [window.parts.tolist() for window in deal(3, epoch, np.full(12, 50), Order(2, 3), 0)] for epoch in range(4)
    ]
    assert len({str(parts) for parts in dealt}) == 4
    assert dealt[0] != [window.parts.tolist() for window in deal(4, 0, np.full(12, 50), Order(2, 3), 0)]


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(lambda sizes: sum(sizes) >= 8),
    st.sampled_from([1, 8]), st.integers(1, 3), st.integers(0, 200),
)  # fmt: skip
def test_hosts_together_build_the_global_batch_and_any_step_alone(sizes, lanes, window, step):
    whole = counted(sizes, 8, lanes, window).batch(step, np.arange(16))  # with the next step's
    for hosts in (1, 2, 4, 8):
        for rows in np.split(np.arange(8), hosts):
            batch = counted(sizes, 8, lanes, window).batch(step, rows)
            assert all(batch[name].tolist() == whole[name][rows].tolist() for name in whole)


def test_what_comes_next_is_wanted_and_what_is_done_released():
    examples = counted([50] * 12, 2, lanes=1, window=3)
    corpus = examples.examples.corpus
    corpus.released.clear()  # what was counted
    windows = [window.parts.tolist() for window in deal(SEED, 0, np.full(12, 50), Order(1, 3), 0)]
    examples.batch(0, np.arange(2))
    assert [sorted(parts) for parts in corpus.wanted] == [sorted(windows[0] + windows[1])]
    examples.batch(75, np.arange(2))
    assert sorted(corpus.wanted[-1]) == sorted(windows[1] + windows[2]) and not corpus.released
    for step in range(76, 76 + KEPT):
        examples.batch(step, np.arange(2))
    assert sorted(corpus.released) == windows[0] and len(corpus.wanted) == 2


def test_counting_keeps_no_part():
    examples = counted([50] * 12, 2)
    assert examples.examples.corpus.released == list(range(12))


def test_an_evaluation_reads_evenly_spaced_parts():
    examples = counted([10] * 40, 16, lanes=8, split="heldout").examples
    assert [part.index for part in examples.parts] == list(range(0, 40, 5)) and len(examples.parts) == HELD_OUT
    assert examples.number == 80
    parts = np.concatenate([examples.build(0, chosen)["part"] for chosen in examples.fixed(40)])
    assert np.bincount(parts, minlength=40)[::5].tolist() == [5] * 8


def test_lanes_that_do_not_fit_are_errors():
    with pytest.raises(UserError, match="batch size=12 is not a multiple of order.lanes=8"):
        counted([10], 12, lanes=8)
    with pytest.raises(UserError, match="has 7 examples for 8 lanes; lower order.lanes or prepare more text"):
        counted([3, 4], 8, lanes=8).batch(0, np.arange(8))
    with pytest.raises(UserError, match="order.window=0: must be at least 1"):
        Order(window=0)
