"""Pairs are BERT's: runs of sentences or two sentences, half of the Bs from elsewhere, cut like its loop cuts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines import noise
from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.masking import SEGMENTS, Masking
from data_pipelines.examples.segment_pairs import NEXT_SENTENCE, SENTENCE_ORDER, SegmentPairs, SentencePairs, truncated
from tests.data_pipelines.corpora import epoch, numbered, rows_of, unmasked, write_corpus

CLS, SEP, PAD, FIRST = 2, 3, 0, 5
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=6), min_size=1, max_size=8)
VOCAB = 60_000
LABELS = (None, NEXT_SENTENCE, SENTENCE_ORDER)


def corpus_of(tmp_path_factory, shape):
    """A corpus in which a token says where it stands: the offset is token - FIRST."""
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "c", numbered(shape), vocab_size=VOCAB))


def random_corpus(tmp_path_factory, longest):
    """150 documents of fewer than 30 sentences, these of fewer tokens than `longest`."""
    generator = np.random.default_rng(0)
    shape = [generator.integers(1, longest, generator.integers(1, 30)).tolist() for _ in range(150)]
    return corpus_of(tmp_path_factory, shape)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory, 40)


def segments_of(batch):
    """(offsets of A, offsets of B) of each row, after checking [CLS] A [SEP] or [CLS] A [SEP] B [SEP] and the types."""
    pairs = []
    for tokens, types, segments in zip(unmasked(batch), batch["types"], batch["segments"], strict=True):
        end = segments.sum()
        assert segments[:end].all() and tokens[end:].tolist() == [PAD] * (len(tokens) - end)
        separators = np.flatnonzero(tokens[:end] == SEP)
        assert tokens[0] == CLS and separators[-1] == end - 1 and len(separators) in (1, 2)
        middle = separators[0]
        assert types.tolist() == [0] * (middle + 1) + [1] * (end - middle - 1) + [0] * (len(tokens) - end)
        a, b = tokens[1:middle] - FIRST, tokens[middle + 1 : max(end - 1, middle + 1)] - FIRST
        assert len(a) and (np.diff(a) == 1).all() and (np.diff(b) == 1).all()
        pairs.append((a, b))
    return pairs


def document_of(corpus, offsets):
    """The document that holds all the offsets."""
    starts = corpus.parts[0].sentences("train")[corpus.parts[0].documents("train")]
    first, last = np.searchsorted(starts, [offsets[0], offsets[-1]], "right") - 1
    assert first == last, "a segment crosses documents"
    return first


@pytest.mark.parametrize("kind", [SegmentPairs, SentencePairs])
@settings(max_examples=20)
@given(shape=SHAPES, length=st.sampled_from([5, 6, 16, 33]), label=st.sampled_from(LABELS), seed=st.integers(0, 9))
def test_odd_corpora_make_proper_pairs(tmp_path_factory, kind, shape, length, label, seed):
    corpus = corpus_of(tmp_path_factory, shape)
    examples = make_examples(kind(length, label=label), corpus, "train", 4, seed=seed)
    documents = np.count_nonzero(corpus.parts[0].lengths("train"))
    assert (examples.number == 0) == (documents == 0)
    batch = epoch(examples) if documents else {}
    for index, (a, b) in enumerate(segments_of(batch) if documents else []):
        value = batch[label][index] if label else 0 if len(b) else -1
        assert (value == -1) == (len(b) == 0)
        if len(b):
            apart = document_of(corpus, a) != document_of(corpus, b)
            assert apart == (label == NEXT_SENTENCE and value == 1)
            first, second = (b, a) if label == SENTENCE_ORDER and value == 1 else (a, b)
            assert apart or second[0] > first[-1]
            full = len(a) + len(b) == length - 3
            assert apart or full or second[0] == first[-1] + 1, "tokens are missing though there was room"
        elif label == NEXT_SENTENCE:
            assert documents == 1


def test_segments_are_whole_sentences_wherever_nothing_was_cut(corpus):
    borders = set(corpus.parts[0].sentences("train").tolist())
    examples = make_examples(SegmentPairs(64), corpus, "train", 4, seed=1)
    short = [pair for pair in segments_of(epoch(examples)) if sum(map(len, pair)) < 61]
    assert len(short) > 100
    for segment in (segment for pair in short for segment in pair):
        assert {segment[0], segment[-1] + 1} <= borders


def test_without_next_sentence_the_text_runs_through_the_rows_in_order(corpus):
    rows = segments_of(rows_of(SegmentPairs(64, label=None), corpus, 1))
    rows = [np.concatenate(pair) for pair in rows]
    assert rows[0][0] == 0 or len(rows[0]) == 61
    for row, following in pairwise(rows):
        gap = following[0] - row[-1] - 1
        assert gap == 0 or (gap > 0 and 61 in (len(row), len(following))), "only a full row may have lost text"


def test_a_chunk_ends_where_its_target_is_reached(tmp_path_factory):
    """In a document of one-token sentences a chunk is exactly its target: 9 in 10 the whole room, the rest uniform."""
    corpus = corpus_of(tmp_path_factory, [[1] * 50_000])
    pairs = []
    for seed in range(4):
        pairs += segments_of(rows_of(SegmentPairs(23, label=None), corpus, seed))[:-1]
    lengths = [len(a) + len(b) for a, b in pairs]
    counts = np.bincount(lengths, minlength=21)
    rows = len(lengths)
    assert not counts[:2].any() and len(counts) == 21
    assert abs(counts[2:20].sum() - rows * 0.1 * 18 / 19) < 5 * np.sqrt(rows * 0.09)
    expected = rows * 0.1 / 19
    assert np.abs(counts[2:20] - expected).max() < 5 * np.sqrt(expected)
    splits = np.array([len(a) for a, b in pairs if len(a) + len(b) == 20])
    assert abs(splits.mean() - 10) < 5 * 5.5 / np.sqrt(len(splits)) and set(splits) == set(range(1, 20))


def test_half_of_the_pairs_continue_and_random_ones_begin_anywhere(tmp_path_factory):
    corpus = corpus_of(tmp_path_factory, [[4] * 40] * 200)
    batches = [rows_of(SegmentPairs(32), corpus, 3, number=number) for number in range(4)]
    labels = np.concatenate([batch["next_sentence"] for batch in batches])
    assert set(labels) == {0, 1}
    assert abs(labels.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(labels)) + 0.01  # a document's last sentence may be alone
    pairs = [pair for batch in batches for pair in segments_of(batch)]
    random = [b[0] for (_, b), label in zip(pairs, labels, strict=True) if label]
    sentence = np.array(random) // 4
    own = np.array([a[0] // 160 for (a, _), label in zip(pairs, labels, strict=True) if label])
    distance = (sentence // 40 - own) % 200
    assert abs(np.corrcoef(distance, sentence % 40)[0, 1]) < 5 / np.sqrt(len(own))  # drawn apart
    for where, values in ((sentence // 40, 200), (sentence % 40, 40)):
        counts = np.bincount(where, minlength=values)
        expected = len(random) / values
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - values) < 5 * np.sqrt(2 * values)


def test_half_of_the_pairs_are_exchanged_and_labelled_so(tmp_path_factory):
    corpus = corpus_of(tmp_path_factory, [[5, 9, 2, 14, 7, 3] * 30] * 30)
    batches = [rows_of(SegmentPairs(32, label=SENTENCE_ORDER), corpus, 3, number=number) for number in range(4)]
    labels = np.concatenate([batch[SENTENCE_ORDER] for batch in batches])
    pairs = [pair for batch in batches for pair in segments_of(batch)]
    assert [int(b[0] < a[0]) if len(b) else -1 for a, b in pairs] == labels.tolist()
    both = labels[labels >= 0]
    assert len(both) > 3000 and abs(both.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(both))


def test_whole_words_are_masked_whole_and_end_with_their_segment(tmp_path):
    shape = [[17, 33, 9, 26, 14, 5, 31] * 3] * 30
    starts = {"word_starts": lambda token: token % 4 == 0}
    corpus = Corpus(write_corpus(tmp_path / "corpus", numbered(shape), vocab_size=VOCAB, **starts))
    batch = rows_of(SegmentPairs(64, masks=Masking(rate=0.5, unit="word_starts")), corpus, 1)
    text = unmasked(batch)
    chosen = np.zeros(text.shape, bool)
    row, slot = np.nonzero(batch["prediction_weights"])
    chosen[row, batch["prediction_positions"][row, slot]] = True
    ordinary = text >= FIRST
    continues = (text[:, 1:] % 4 != 0) & ordinary[:, 1:]
    inside, across = continues & ordinary[:, :-1], continues[:, 1:] & (text[:, 1:-1] == SEP)
    assert np.array_equal(chosen[:, 1:][inside], chosen[:, :-1][inside])
    apart = chosen[:, 2:][across] != chosen[:, :-2][across]  # the rest of a cut word, and the last word of A
    assert len(apart) > 100 and abs(apart.mean() - 0.5) < 5 * np.sqrt(0.25 / len(apart))


def truncated_slowly(a, b, room, front):
    """BERT's loop over two lists; front: whether a token leaves at the front."""
    a, b = list(a), list(b)
    while len(a) + len(b) > room:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if front() else -1)
    return a, b


@given(st.integers(1, 70), st.integers(0, 70), st.integers(2, 60), st.booleans())
def test_segments_are_cut_as_bert_s_loop_cuts_them(a, b, room, front):
    start, size = np.array([[100, 300]]), np.array([[a, b]])
    coins = np.full((1, 2, 3), 0xFFFFFFFF if front else 0, np.uint32)
    start, size = truncated(start, size, room, coins)
    expected = truncated_slowly(range(100, 100 + a), range(300, 300 + b), room, lambda: front)
    assert [list(range(*span)) for span in zip(start[0], start[0] + size[0], strict=True)] == list(expected)


def test_the_cut_is_at_either_end_by_a_coin_per_token():
    bits = noise.bits(noise.key(0, np.arange(4000)), noise.counters(SEGMENTS, 6)).reshape(-1, 2, 3)
    start, size = truncated(np.zeros((4000, 2), np.int64), np.full((4000, 2), 70), 60, bits)
    assert (size == 30).all()  # 40 of 70 tokens leave each segment: 20 in front, binomially
    assert abs(start.mean() - 20) < 5 * np.sqrt(10 / 8000) and abs(start.var() - 10) < 1
    assert abs(np.corrcoef(start.T)[0, 1]) < 0.08


@pytest.fixture(scope="module")
def short_corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory, 15)


def test_both_segments_are_one_whole_sentence_and_half_of_the_bs_are_from_elsewhere(short_corpus):
    borders = short_corpus.parts[0].sentences("train")
    examples = make_examples(SentencePairs(32), short_corpus, "train", 4, seed=1)
    batch = epoch(examples)
    sentence = lambda offsets: np.searchsorted(borders, offsets[0], "right") - 1
    for (a, b), label in zip(segments_of(batch), batch[NEXT_SENTENCE], strict=True):
        for segment in (a, b):
            first = sentence(segment)
            assert [segment[0], segment[-1] + 1] == borders[first : first + 2].tolist()
        assert (sentence(b) == sentence(a) + 1) == (label == 0)
    starts = short_corpus.parts[0].documents("train")
    odd = np.count_nonzero(np.diff(starts) % 2)  # documents whose last sentence has none after it
    assert examples.number == (len(borders) - 1 + odd) / 2
    expected = (examples.number - odd) / 2 + odd
    assert abs(batch[NEXT_SENTENCE].sum() - expected) < 5 * np.sqrt(examples.number / 4)
