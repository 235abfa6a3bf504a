"""Parts are dealt to lanes so that every example comes once an epoch, wherever its rows are built."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.batches import HELD_OUT, KEPT
from data_pipelines.errors import UserError
from data_pipelines.order import Order, deal, permute
from tests.data_pipelines.counted import SEED, counted

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


def test_a_window_is_kept_however_seldom_its_lane_has_a_row():
    examples = counted([50] * 12, 2, lanes=2, window=3)
    corpus = examples.examples.corpus
    corpus.released.clear()
    examples.batch(0, np.arange(2))
    for step in range(1, 4 * KEPT):
        examples.batch(step, np.array([0]))  # the first lane's row
    assert not corpus.released


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
