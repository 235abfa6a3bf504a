"""Pairs of sentences are two natural sentences each: neighbours of one document, or one of another document as B."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipelines.batches import make_examples
from data_pipelines.examples.segment_pairs import NEXT_SENTENCE, SENTENCE_ORDER
from data_pipelines.examples.sentence_pairs import SentencePairs
from tests.data_pipelines.corpora import epoch
from tests.data_pipelines.test_segment_pairs import LABELS, SHAPES, corpus_of, document_of, segments_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = np.random.default_rng(0)
    shape = [generator.integers(1, 15, generator.integers(1, 30)).tolist() for _ in range(150)]
    return corpus_of(tmp_path_factory, shape)


def pairs_slowly(documents, length):
    """The (A, B) of each row as offsets without labels, by a loop; every sentence fits half a row."""
    pairs, offset = [], 0
    for document in documents:
        sentences = []
        for size in filter(None, document):
            sentences.append(list(range(offset, offset + size)))
            offset += size
        for first in range(0, len(sentences), 2):
            pairs.append((sentences[first], sentences[first + 1] if first + 1 < len(sentences) else []))
    return pairs


SHORT = st.lists(st.lists(st.integers(0, 14), max_size=6), min_size=1, max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(shape=SHORT)
def test_without_a_label_each_sentence_is_in_a_row_with_its_neighbour(tmp_path_factory, shape):
    examples = make_examples(SentencePairs(32, label=None), corpus_of(tmp_path_factory, shape), "train", 4, seed=0)
    expected = pairs_slowly(shape, 32)
    assert examples.number == len(expected)
    if expected:
        assert [(a.tolist(), b.tolist()) for a, b in segments_of(epoch(examples))] == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(shape=SHAPES, length=st.sampled_from([5, 6, 16, 33]), label=st.sampled_from(LABELS), seed=st.integers(0, 9))
def test_odd_corpora_make_proper_pairs(tmp_path_factory, shape, length, label, seed):
    corpus = corpus_of(tmp_path_factory, shape)
    examples = make_examples(SentencePairs(length, label=label), corpus, "train", 4, seed=seed)
    documents = np.count_nonzero(corpus.parts[0].lengths("train"))
    for index, (a, b) in enumerate(segments_of(epoch(examples)) if documents else []):
        value = epoch(examples)[label][index] if label else 0 if len(b) else -1
        assert (value == -1) == (len(b) == 0)
        if len(b):
            assert (document_of(corpus, a) != document_of(corpus, b)) == (label == NEXT_SENTENCE and value == 1)


def test_both_segments_are_one_whole_sentence_and_half_of_the_bs_are_from_elsewhere(corpus):
    borders = corpus.parts[0].sentences("train")
    examples = make_examples(SentencePairs(32), corpus, "train", 4, seed=1)
    batch = epoch(examples)
    sentence = lambda offsets: np.searchsorted(borders, offsets[0], "right") - 1
    for (a, b), label in zip(segments_of(batch), batch[NEXT_SENTENCE], strict=True):
        for segment in (a, b):
            first = sentence(segment)
            assert [segment[0], segment[-1] + 1] == borders[first : first + 2].tolist()
        assert (sentence(b) == sentence(a) + 1) == (label == 0)
    starts = corpus.parts[0].documents("train")
    odd = np.count_nonzero(np.diff(starts) % 2)  # documents whose last sentence has none after it
    assert examples.number == (len(borders) - 1 + odd) / 2
    expected = (examples.number - odd) / 2 + odd
    assert abs(batch[NEXT_SENTENCE].sum() - expected) < 5 * np.sqrt(examples.number / 4)


def test_pairs_may_be_exchanged_and_drawn_anew_in_every_epoch(corpus):
    examples = make_examples(SentencePairs(32, label=SENTENCE_ORDER), corpus, "train", 4, seed=1)
    labels = [epoch(examples, number)[SENTENCE_ORDER] for number in (0, 1)]
    assert 0.2 < (labels[0] != labels[1]).mean() < 0.8
    for (a, b), label in zip(segments_of(epoch(examples)), labels[0], strict=True):
        assert (label == -1) if not len(b) else (label == int(b[0] < a[0]))
