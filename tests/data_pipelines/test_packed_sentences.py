"""Packed rows are what a plain loop over the sentences packs, each token once per epoch, documents apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.packed_sentences import PackedSentences
from tests.data_pipelines.corpora import epoch, numbered, random_documents, rows_of, unmasked, write_corpus

CLS, SEP, PAD = 2, 3, 0
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=6), min_size=1, max_size=8)


def packed_slowly(documents, length, one_document=False):
    """Each row as (tokens, segments), by a loop over the pieces of text."""
    pieces = []  # (document, tokens)
    for number, document in enumerate(documents):
        for sentence in document:
            pieces += [(number, sentence[i : i + length - 2]) for i in range(0, len(sentence), length - 2)]
    rows, row = [], []
    for piece in pieces:
        longer = row + [piece]
        tokens = sum(len(text) for _, text in longer) + len({document for document, _ in longer})
        if 1 + tokens > length or (one_document and row and row[-1][0] != piece[0]):
            rows.append(row)
            longer = [piece]
        row = longer
    return [written(row, length) for row in rows + [row] if row]


def written(row, length):
    tokens, segments, segment = [CLS], [1], 1
    for index, (document, text) in enumerate(row):
        if index and document != row[index - 1][0]:
            tokens.append(SEP)
            segments.append(segment)
            segment += 1
        tokens += text
        segments += [segment] * len(text)
    missing = length - len(tokens) - 1
    return tokens + [SEP] + [PAD] * missing, segments + [segment] + [0] * missing


@settings(max_examples=30)
@given(shape=SHAPES, length=st.sampled_from([3, 4, 7, 16, 33]), one_document=st.booleans())
def test_rows_are_those_of_a_plain_loop(tmp_path_factory, shape, length, one_document):
    documents = numbered(shape)
    corpus = Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "c", documents, vocab_size=3000))
    examples = make_examples(PackedSentences(length, one_document=one_document), corpus, "train", 4, seed=0)
    expected = packed_slowly(documents, length, one_document)
    assert examples.number == len(expected)
    if expected:
        batch = epoch(examples)
        assert unmasked(batch).tolist() == [tokens for tokens, _ in expected]
        assert batch["segments"].tolist() == [segments for _, segments in expected]


def filled_slowly(documents, length):
    """The same with rows that a loop over the tokens fills."""
    rows, row, number = [], [], 0
    for document, text in enumerate([token for sentence in of for token in sentence] for of in documents):
        for token in text:
            is_new = bool(row) and row[-1][0] != document
            if 1 + number + 1 + is_new + 1 > length:
                rows.append(row)
                row, number, is_new = [], 0, False
            row.append((document, [token]))
            number += 1 + is_new
    return [written(row, length) for row in rows + [row] if row]


@settings(max_examples=50)
@given(shape=SHAPES, length=st.sampled_from([3, 4, 7, 16, 33]))
def test_full_rows_are_those_of_a_loop_over_tokens(tmp_path_factory, shape, length):
    documents = numbered(shape)
    corpus = Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "c", documents, vocab_size=3000))
    examples = make_examples(PackedSentences(length, cut=True), corpus, "train", 4, seed=0)
    expected = filled_slowly(documents, length)
    assert examples.number == len(expected)
    if expected:
        batch = epoch(examples)
        assert unmasked(batch).tolist() == [tokens for tokens, _ in expected]
        assert batch["segments"].tolist() == [segments for _, segments in expected]
        assert all((row > 0).sum() >= length - 1 for row in batch["segments"][:-1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "c", random_documents(0, 60), heldout=[]))


@pytest.mark.parametrize("across", [False, True])
def test_attention_may_cross_documents_only_when_asked(corpus, across):
    batch = rows_of(PackedSentences(128, cross_document_attention=across), corpus)
    real = unmasked(batch) != PAD
    assert np.array_equal(batch["segments"] > 0, real)
    assert (batch["segments"].max() == 1) == across
    assert not batch["types"].any()
