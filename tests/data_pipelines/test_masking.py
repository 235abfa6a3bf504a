"""Exactly the asked share is chosen, only where it may be, and corrupted in the asked proportions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.document import Annotation
from data_pipelines.examples.masking import SIZES, TOKENS, Masking, SpecialTokens, mask, predictions
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.store.fields import Field
from data_pipelines.text.steps import STEPS, Step, of_document
from tests.data_pipelines.corpora import chosen, rows_of, unmasked, write_corpus
from tests.data_pipelines.prepared import CHARACTERS, run

VOCAB = 1000
ALBERT, MACBERT = (1, 1 / 2, 1 / 3), (0.4, 0.3, 0.2, 0.1)  # weights of n-grams
SPECIAL = SpecialTokens(pad=0, cls=2, sep=3, mask=4, ordinary=np.arange(5, VOCAB, dtype=np.int32))


def masked(masking, tokens, maskable, word_starts=None, seed=0):
    """The batch that `mask` makes of a copy of the tokens."""
    tokens = tokens.copy()
    keys = noise.key(seed, 0, np.arange(len(tokens)))
    available = np.count_nonzero(maskable, axis=1)
    return {"tokens": tokens} | mask(masking, SPECIAL, keys, tokens, maskable, available, word_starts)


def rows(batch, length, seed=0):
    """Random tokens, special at both ends and padding of random extent; word starts: tokens, maskable, word_starts."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(5, VOCAB, (batch, length)).astype(np.int32)
    column, end = np.arange(length), generator.integers(3, length + 1, batch)[:, None]
    maskable = (column > 0) & (column < end - 1)
    tokens[~maskable] = SPECIAL.sep
    return tokens, maskable, (generator.random((batch, length)) < 0.6) | ~maskable


@pytest.mark.parametrize("rate", [0.15, 0.01, 1.0])
@pytest.mark.parametrize("length", [8, 37, 128])
def test_every_row_has_exactly_its_share_chosen(rate, length):
    tokens, maskable, _ = rows(50, length)
    batch = masked(Masking(rate=rate), tokens, maskable)
    available = maskable.sum(axis=1)
    asked = np.maximum(np.rint(rate * available), 1)
    assert batch["prediction_weights"].sum(axis=1).tolist() == asked.tolist()
    assert batch["prediction_weights"].shape == (50, predictions(length, rate))
    assert not (chosen(batch) & ~maskable).any()


@pytest.mark.parametrize("unit", ["token", "word_starts"])
def test_slots_hold_the_positions_in_order_and_what_stood_there(unit):
    tokens, maskable, word_starts = rows(50, 64)
    batch = masked(Masking(unit=unit), tokens, maskable, None if unit == "token" else word_starts)
    assert np.array_equal(unmasked(batch), tokens)
    used = batch["prediction_weights"] == 1
    for positions, row in zip(batch["prediction_positions"], used, strict=True):
        assert np.all(np.diff(positions[row]) > 0) and row[: row.sum()].all()
    assert not batch["prediction_positions"][~used].any() and not batch["prediction_targets"][~used].any()
    assert np.array_equal(batch["tokens"][~chosen(batch)], tokens[~chosen(batch)])


@pytest.mark.parametrize(("share", "random"), [(0.8, 0.1), (0.85, 0.0), (0.0, 1.0), (1.0, 0.0), (0.3, 0.2)])
def test_the_chosen_are_masked_replaced_or_kept_in_proportion(share, random):
    tokens, maskable, _ = rows(2000, 128)
    batch = masked(Masking(mask=share, random=random), tokens, maskable)
    where = chosen(batch)
    before, after = tokens[where], batch["tokens"][where]
    for fraction, observed in (
        (share, after == SPECIAL.mask),
        (random * (1 - 1 / len(SPECIAL.ordinary)), (after != SPECIAL.mask) & (after != before)),
    ):
        assert abs(observed.mean() - fraction) <= 5 * np.sqrt(fraction * (1 - fraction) / len(after))


def test_random_tokens_come_from_the_whole_vocabulary_alike_but_the_special():
    tokens, maskable, _ = rows(3000, 128)
    batch = masked(Masking(mask=0.2, random=0.8), tokens, maskable)
    after = batch["tokens"][chosen(batch)]
    counts = np.bincount(after[after != SPECIAL.mask], minlength=VOCAB)
    assert not counts[:5].any()
    expected = counts.sum() / (VOCAB - 5)
    chi_square = ((counts[5:] - expected) ** 2 / expected).sum()  # 994 degrees of freedom: deviation 44.6
    assert abs(chi_square - 994) < 5 * 44.6


@pytest.mark.parametrize("fate", ["unit", "span"])
def test_units_and_spans_are_masked_replaced_or_kept_as_a_whole(fate):
    tokens, maskable, word_starts = rows(3000, 128)
    batch = masked(Masking(unit="word_starts", ngrams=MACBERT, fate=fate), tokens, maskable, word_starts)
    where = chosen(batch)
    before = np.pad(where[:, :-1], ((0, 0), (1, 0)))
    begins = where & (~before | word_starts) if fate == "unit" else where & ~before
    whole = np.cumsum(begins.ravel())[where.ravel()] - 1  # number of each chosen token's unit or span
    after, of_text = batch["tokens"][where], tokens[where]
    counts = np.zeros((3, begins.sum()), int)  # tokens that are masked, kept, random
    kinds = np.where(after == SPECIAL.mask, 0, np.where(after == of_text, 1, 2))
    np.add.at(counts, (kinds, whole), 1)
    sizes, number = counts.sum(axis=0), begins.sum()
    by_chance = 5 * np.sqrt(number / len(SPECIAL.ordinary)) + number / len(SPECIAL.ordinary)  # random, yet the same
    assert (counts.max(axis=0) != sizes).sum() <= by_chance
    for share, kind in zip((0.8, 0.1, 0.1), counts, strict=True):
        assert abs((kind == sizes).mean() - share) <= 5 * np.sqrt(share * (1 - share) / number) + 1e-3
    if fate == "unit":  # and neighbouring units each by itself: 0.8^2 + 0.1^2 + 0.1^2 alike
        alike = (counts.argmax(axis=0)[1:] == counts.argmax(axis=0)[:-1]).mean()
        assert abs(alike - 0.66) < 0.02
    drawn_alike = (after[1:] == after[:-1]) & (kinds[1:] == 2) & (whole[1:] == whole[:-1])
    assert drawn_alike.sum() <= 5 + 5 * len(after) / len(SPECIAL.ordinary)


def drawn(key, stream, number):
    """The random bits of one counter of a row's stream, as a Python integer."""
    return int(noise.bits(key, noise.counters(stream, number + 1)[-1:])[0])


def chosen_slowly(masking, key, maskable, word_starts):
    """The positions that one row should have chosen, by plain loops."""
    runs, number, words, drawn_runs = {}, 0, 0, 0
    for position in range(len(maskable)):
        fresh = position == 0 or not maskable[position - 1]
        begins = fresh if masking.ngrams else word_starts[position]
        if masking.ngrams and maskable[position] and (fresh or word_starts[position]):
            if words == 0:  # the run has all its words: draw the next one's
                share = drawn(key, SIZES, drawn_runs) / 2**32 * sum(masking.ngrams)
                words = next(n for n in range(1, 99) if share < sum(masking.ngrams[:n]))
                drawn_runs, begins = drawn_runs + 1, True
            words -= 1
        number += begins
        if maskable[position]:
            runs.setdefault(drawn(key, TOKENS, number) >> (len(maskable) - 1).bit_length(), []).append(position)
    left = min(max(round(masking.rate * sum(maskable)), 1), sum(maskable))
    found = []
    for _, positions in sorted(runs.items()):
        if len(positions) <= left:
            found += positions
            left -= len(positions)
    return sorted(found)


@settings(max_examples=50)
@given(
    length=st.integers(3, 40),
    starts=st.sampled_from([0.2, 0.6, 1.0]),
    specials=st.sampled_from([0.0, 0.1, 0.5]),
    rate=st.sampled_from([0.05, 0.15, 0.5, 1.0]),
    ngrams=st.sampled_from([(), ALBERT, MACBERT, (0, 0, 1), (1,), (0.3, 0, 0.2, 0)]),
    seed=st.integers(0, 999),
)
def test_words_and_n_grams_are_those_of_a_plain_loop(length, starts, specials, rate, ngrams, seed):
    generator = np.random.default_rng(seed)
    maskable = generator.random((3, length)) >= specials
    maskable[:, 0] = False
    word_starts = (generator.random((3, length)) < starts) | ~maskable
    by_token = starts == 1 and ngrams != ()  # words of one token each
    masking = Masking(rate=rate, unit="token" if by_token else "word_starts", ngrams=ngrams)
    batch = masked(masking, np.full((3, length), 9, np.int32), maskable, None if by_token else word_starts, seed)
    for row, where in enumerate(chosen(batch)):
        key = int(noise.key(seed, 0, np.arange(3))[row])
        assert np.flatnonzero(where).tolist() == chosen_slowly(masking, key, maskable[row], word_starts[row])


@pytest.mark.parametrize("layout", [PackedSentences, SegmentPairs])
def test_units_are_of_any_field_that_says_where_they_begin(tmp_path, monkeypatch, layout):
    """An annotator's, say: phrases, each up to a comma and with it, which is a word of its own."""

    def phrases(document):
        (segment,) = document.segments
        begins = [0, *(place + 1 for place, character in enumerate(segment.text) if character == ",")][:-1]
        notes = (Annotation("phrase_starts", 0, begin, begin + 1, True) for begin in begins)
        return document._replace(annotations=tuple(notes))

    monkeypatch.setitem(STEPS, "phrases", Step(1, of_document(phrases), fields={"phrase_starts": Field("bool")}))
    random = np.random.default_rng(0)
    text = "".join("".join(random.choice([*"abcxyz"], random.integers(1, 6))) + "," for _ in range(3000))
    (tmp_path / "a.txt").write_text(text)
    run(tmp_path / "c", f"text:{tmp_path / 'a.txt'}", steps=("phrases",))
    batch = rows_of(layout(64, Masking(rate=0.3, unit="phrase_starts")), Corpus(tmp_path / "c"))
    texts, found, comma = unmasked(batch), chosen(batch), 5 + CHARACTERS.index(",")
    goes_on = (texts[:, :-1] >= 5) & (texts[:, :-1] != comma) & (texts[:, 1:] >= 5)
    assert np.array_equal(found[:, :-1][goes_on], found[:, 1:][goes_on])
    begins = (texts[:, :-1] == comma) & (texts[:, 1:] >= 5)
    assert 0.3 < (found[:, :-1][begins] != found[:, 1:][begins]).mean() < 0.6  # each phrase for itself: 0.42


def test_a_row_without_text_predicts_nothing():
    batch = masked(Masking(), np.full((2, 8), 3, np.int32), np.zeros((2, 8), bool))
    assert not batch["prediction_weights"].any() and (batch["tokens"] == 3).all()


def test_random_tokens_are_drawn_from_all_but_the_special_ones(tmp_path):
    corpus = Corpus(write_corpus(tmp_path / "corpus", [[[7, 8]]], vocab_size=20))
    ordinary = SpecialTokens.of(corpus).ordinary
    assert ordinary.tolist() == sorted(set(range(20)) - set(corpus.special.values()))
