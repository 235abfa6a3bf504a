"""Rates are kept exactly, every corpus has epochs of its own, and who builds the rows changes nothing."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.next_tokens import ContiguousStreams
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.permutations import PermutedSpans, Permuting
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.loader import Loader
from data_pipelines.mixture import BLOCK, counts, make_mixture, parse_rates
from data_pipelines.order import Order
from tests.data_pipelines.corpora import SPECIAL, equal, fits, random_documents, write_corpus
from tests.data_pipelines.counted import Counted, Sizes
from tests.data_pipelines.two_lengths import TwoWindows

WEIGHTS = st.lists(st.integers(1, 2**40), min_size=1, max_size=12).map(tuple)
SHAPE = [[300, 200], [90], [13, 7, 5]]
SIZES = {"en": 8000, "zh": 1000, "is": 1}


@given(WEIGHTS, st.integers(0, 10**12), st.integers(0, 5000))
def test_counts_add_up_never_fall_and_stay_near_their_rates(weights, rows, more):
    found, later = counts(weights, rows), counts(weights, rows + more)
    assert sum(found) == rows and min(found) >= 0
    assert all(after >= before for before, after in zip(found, later, strict=True))
    bound = sum(Fraction(1, index + 1) for index in range(len(weights))) / 2
    assert all(abs(n - Fraction(w, sum(weights)) * rows) <= bound for n, w in zip(found, weights, strict=True))


@pytest.mark.parametrize(
    "text, rates",
    [
        ("given:3,1,1", (3 / 5, 1 / 5, 1 / 5)),
        ("proportional", (8000 / 9001, 1000 / 9001, 1 / 9001)),
        ("proportional:2000", (2000 / 3001, 1000 / 3001, 1 / 3001)),
        ("proportional:0.5", (1 / 3, 1 / 3, 1 / 3)),
        ("equal", (1 / 3, 1 / 3, 1 / 3)),
        ("temperature:2,900", (30 / 61, 30 / 61, 1 / 61)),
        ("temperature:2", tuple(x**0.5 / (8000**0.5 + 1000**0.5 + 1) for x in (8000, 1000, 1))),
        ("smoothed:0.7", tuple(x**0.7 / (8000**0.7 + 1000**0.7 + 1) for x in (8000, 1000, 1))),
    ],
)
def test_rates(text, rates):
    assert parse_rates(text, SIZES) == pytest.approx(dict(zip(SIZES, rates, strict=True)))
    assert [*parse_rates("smoothed:1000", SIZES).values()] == [1, 0, 0]  # no overflow


@pytest.mark.parametrize(
    "text, said",
    [
        ("given:0.5,0.5", "mixture=given:0.5,0.5: 2 rates for en, "),
        ("given:1,0,1", "numbers must be above 0"),
        ("smoothed:x", "'x' is not a number"),
        ("proportional:inf", "numbers must be above 0 and finite"),
        ("", "mixture=: '' is not a form of rates; use proportional"),
        ("equal:2", "mixture=equal:2: too many numbers for equal; use proportional"),
        ("smoothed", "mixture=smoothed: too few numbers for smoothed"),
    ],
)
def test_what_is_no_mixture_is_said(text, said):
    with pytest.raises(UserError, match=said):
        parse_rates(text, SIZES)
    with pytest.raises(UserError, match="mixture=proportional: zh has no text"):
        parse_rates("proportional", {"en": 5, "zh": 0})


def mixed(sizes, rates, batch_size, lanes=1, window=2, seed=5):
    """Rows that say which source, part and example they are."""
    names = [f"source {index}" for index in range(len(sizes))]
    layouts = dict.fromkeys(names, Counted(1))
    corpora = dict(zip(names, map(Sizes, sizes), strict=True))
    return make_mixture(layouts, corpora, rates, batch_size, seed, Order(lanes, window))


def sources_of(mixture, batch):
    """Which source each row is of, by its key, and the epoch: int64 [2, n]. No two have one key."""
    found = np.full((2, len(batch["key"])), -1)
    for index, source in enumerate(mixture.sources.values()):
        firsts = np.cumsum((0, *source.sizes))
        for epoch in range(48):
            inside = batch["part"] < len(source.sizes)
            example = firsts[np.where(inside, batch["part"], 0)] + batch["example"]
            found[:, inside & (noise.key(source.seed, epoch, example) == batch["key"])] = [[index], [epoch]]
    return found


@pytest.mark.parametrize("lanes", [1, 4])
def test_every_block_has_its_exact_counts_shuffled_inside_and_every_epoch_every_example(lanes):
    mixture = mixed(SHAPE, (0.7, 0.25, 0.05), 64, lanes)
    per_lane, found, examples = 64 // lanes, [], []
    for step in range(0, 2 * BLOCK // per_lane, 16):
        batch = mixture.batch(step, np.arange(16 * 64))
        source, epoch = sources_of(mixture, batch)
        found.append(source.reshape(16, lanes, per_lane).swapaxes(0, 1).reshape(lanes, -1))
        examples.append((source, epoch, batch["part"], batch["example"]))
        if step in (16, 48):
            before = np.bincount(np.concatenate(found[:-1], axis=None), minlength=3)
            assert list(mixture.rows_before(step).values()) == before.tolist()
    by_lane = np.concatenate(found, axis=1)
    for rows in by_lane:
        for block in range(2):
            ends = [counts(mixture.weights, BLOCK * at) for at in (block, block + 1)]
            expected = np.diff(ends, axis=0)[0].tolist()
            inside = rows[block * BLOCK : (block + 1) * BLOCK]
            assert np.bincount(inside, minlength=3).tolist() == expected
            assert (np.bincount(inside[: BLOCK // 4], minlength=3)[:2] > 0.2 * np.array(expected[:2])).all()
    blocks = by_lane.reshape(2 * lanes, BLOCK)  # no two are shuffled alike: 0.7² + 0.25² + 0.05² agree
    assert all(0.5 < (one == other).mean() < 0.61 for one, other in itertools.combinations(blocks, 2))
    seen = Counter(zip(*np.concatenate(examples, axis=1).tolist(), strict=True))
    assert set(seen.values()) == {1} and len(seen) == 2 * BLOCK * lanes
    for source, (sizes, rows) in enumerate(zip(SHAPE, counts(mixture.weights, 2 * BLOCK), strict=True)):
        for epoch in range(rows * lanes // sum(sizes) - lanes):  # of which no lane is in the middle
            assert sum(key[:2] == (source, epoch) for key in seen) == sum(sizes)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    written = lambda index, documents: write_corpus(
        folder / str(index), random_documents(index, documents), special=SPECIAL | {"eod": 99}, parts=3
    )
    return {name: Corpus(written(index, 20 * index + 10)) for index, name in enumerate(("a", "b", "c"))}


LAYOUTS = {
    "pairs": dict.fromkeys("abc", SegmentPairs(16)),
    "pairs and packed": {"a": SegmentPairs(16, label=None), "b": PackedSentences(16), "c": PackedSentences(16)},
    "streams": dict.fromkeys("abc", ContiguousStreams(16, reset=True)),
    "two lengths": dict.fromkeys("abc", TwoWindows(10, 6)),
    "permuted": dict.fromkeys("abc", PermutedSpans(32, Permuting(reuse_len=8, perm_size=8))),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("workers", [{"threads": 0}, {"threads": 3}])
def test_batches_do_not_depend_on_who_prepares_them(corpora, name, workers):
    mixture = make_mixture(LAYOUTS[name], corpora, (0.5, 0.3, 0.2), 24, 3, Order(lanes=2))
    rows = np.arange(24)
    whole = {step: make_mixture(LAYOUTS[name], corpora, (0.5, 0.3, 0.2), 24, 3, Order(lanes=2)).batch(step, rows)
             for step in range(5, 60, 9)}  # fmt: skip
    assert fits(whole[5], mixture)
    for mine in (rows, rows[3:9]):
        with Loader(mixture, 5, 60, mine, **workers) as loader:
            for step, batch in loader:
                if step in whole:
                    assert equal(batch, {key: array[mine] for key, array in whole[step].items()})


def test_rows_of_streams_keep_their_corpus_and_go_on(corpora):
    mixture = make_mixture(LAYOUTS["streams"], corpora, (0.5, 0.3, 0.2), 20, 3, Order(lanes=2))
    assert [source.rows for source in mixture.sources.values()] == [5, 3, 2]
    one, other = (mixture.batch(step, np.arange(20)) for step in (0, 1))
    assert np.array_equal(one["targets"][:, -1], other["tokens"][:, 0])
    alone = mixture.sources["b"].at(np.array([1]), np.array([1]), np.array([2]))
    assert np.array_equal(other["tokens"][17], alone["tokens"][0])  # the third of b's rows in the second lane
    assert mixture.rows_before(7) == {"a": 70, "b": 42, "c": 28}


def test_a_rate_without_a_row_and_layouts_that_do_not_go_together_are_errors(corpora):
    with pytest.raises(UserError, match="c has a rate of 0.01, too small for one of the 20 rows of a lane"):
        make_mixture(LAYOUTS["streams"], corpora, (0.59, 0.4, 0.01), 20, 3)
    with pytest.raises(UserError, match="layouts of one spec"):
        make_mixture({"a": SegmentPairs(16), "b": SegmentPairs(17)}, corpora, (0.5, 0.5), 20, 3)
