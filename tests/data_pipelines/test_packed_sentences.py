"""Packed rows are what a plain loop over the sentences packs, each token once per epoch, documents apart."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.packed_sentences import PackedSentences
from tests.data_pipelines.corpora import epoch, equal, numbered, random_documents, unmasked, write_corpus

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "c", random_documents(0, 60), heldout=[]))


def test_rows_of_one_document_have_one_segment_and_no_separator_inside(corpus):
    batch = epoch(make_examples(PackedSentences(64, one_document=True), corpus, "train", 4, seed=0))
    assert batch["segments"].max() == 1 and ((unmasked(batch) == SEP).sum(1) == 1).all()
    packed = epoch(make_examples(PackedSentences(64), corpus, "train", 4, seed=0))
    assert len(packed["segments"]) < len(batch["segments"]), "rows end with their documents"


@pytest.mark.parametrize("whole_word", [False, True])
def test_an_epoch_of_steps_has_every_token_of_the_corpus_once(corpus, whole_word):
    examples = make_examples(PackedSentences(64, masks=Masking(whole_word=whole_word)), corpus, "train", 1, seed=3)
    tokens = [unmasked(examples.batch(step, np.arange(1)))[0] for step in range(examples.number)]
    seen = np.bincount(np.concatenate(tokens), minlength=100)
    assert seen[5:].tolist() == corpus.token_counts()[5:].tolist()


def test_the_order_and_the_noise_change_with_the_epoch_and_the_seed(corpus):
    first, other = (make_examples(PackedSentences(64), corpus, "train", 4, seed=seed) for seed in (0, 1))
    rows = np.arange(4)
    assert not np.array_equal(unmasked(first.batch(0, rows)), unmasked(other.batch(0, rows)))
    assert np.array_equal(unmasked(epoch(first, 0)), unmasked(epoch(first, 1)))
    assert not np.array_equal(epoch(first, 0)["tokens"], epoch(first, 1)["tokens"])


def test_the_share_that_is_predicted_is_of_the_text_without_special_tokens(corpus):
    batch = epoch(make_examples(PackedSentences(64, masks=Masking(rate=0.4)), corpus, "train", 4, seed=0))
    text = (unmasked(batch) >= 5).sum(axis=1)
    assert batch["prediction_weights"].sum(axis=1).tolist() == np.maximum(np.rint(0.4 * text), 1).tolist()


def test_whole_words_are_masked_whole(corpus):
    batch = epoch(make_examples(PackedSentences(64, masks=Masking(whole_word=True)), corpus, "train", 4, seed=0))
    assert batch["prediction_weights"].sum() > 0.13 * (batch["segments"] > 0).sum()
    text = unmasked(batch)
    special = np.isin(text, [PAD, CLS, SEP])
    chosen = np.zeros(text.shape, bool)
    row, slot = np.nonzero(batch["prediction_weights"])
    chosen[row, batch["prediction_positions"][row, slot]] = True
    # A token divisible by 3 continues the word of the token before it, in corpora.write_corpus
    continues = (text % 3 == 0) & ~special
    continues[:, 1:] &= ~special[:, :-1]
    assert np.array_equal(chosen[:, 1:][continues[:, 1:]], chosen[:, :-1][continues[:, 1:]])


@pytest.mark.parametrize("across", [False, True])
def test_attention_may_cross_documents_only_when_asked(corpus, across):
    batch = epoch(make_examples(PackedSentences(128, cross_document_attention=across), corpus, "train", 4, seed=0))
    real = unmasked(batch) != PAD
    assert np.array_equal(batch["segments"] > 0, real)
    assert (batch["segments"].max() == 1) == across
    assert not batch["types"].any()


def test_rows_built_together_are_those_built_apart(corpus):
    examples = make_examples(PackedSentences(32), corpus, "train", 64, seed=5)
    for step in (0, 7):  # some step crosses an epoch's end
        whole = examples.batch(step, np.arange(64))
        for rows in (np.array([0]), np.arange(20, 50), np.array([63, 2, 17])):
            assert equal(examples.batch(step, rows), {name: array[rows] for name, array in whole.items()})


def test_the_spec_is_known_without_data(corpus):
    masks = Masking(rate=0.2)
    batch = make_examples(PackedSentences(64, masks=masks), corpus, "train", 4, seed=0).batch(0, np.arange(3))
    assert {name: (array.shape[1:], array.dtype) for name, array in batch.items()} == PackedSentences(64, masks).spec


def test_a_row_too_short_for_text_and_an_empty_split_are_errors(corpus):
    with pytest.raises(UserError, match="length 2 leaves no room"):
        make_examples(PackedSentences(2), corpus, "train", 4, seed=0)
    empty = make_examples(PackedSentences(16), corpus, "heldout", 4, seed=0)
    assert empty.number == 0
    with pytest.raises(UserError, match="split 'heldout' .* is empty"):
        empty.batch(0, np.arange(4))
