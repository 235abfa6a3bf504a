"""Each sentence of a packed row has a global token: what a plain loop says, documents apart."""

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples import sentence_globals
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.sentence_globals import SentenceGlobals
from tests.data_pipelines.corpora import epoch, equal, numbered, unmasked, write_corpus

CLS, SEP = 2, 3
LENGTH = 48
DOCUMENTS = [[1 + (7 * d + 11 * s) % 12 for s in range(1 + d % 5)] for d in range(40)]  # tokens of each sentence


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "c", numbered(DOCUMENTS), vocab_size=3000))


def sentence_of_tokens():
    """Token -> the number of its sentence in the corpus: every token is another one."""
    sentences = [sentence for document in numbered(DOCUMENTS) for sentence in document]
    return {token: number for number, sentence in enumerate(sentences) for token in sentence}


@pytest.mark.parametrize("number", [4, LENGTH])
@pytest.mark.parametrize("across", [False, True])
def test_each_sentence_of_a_row_is_one_global_token_and_what_is_left_over_has_none(corpus, across, number):
    layout = SentenceGlobals(LENGTH, cross_document_attention=across, globals=number)
    batch, sentences = epoch(make_examples(layout, corpus, "train", 4, seed=0)), sentence_of_tokens()
    over = 0
    for tokens, segments, of, of_globals in zip(
        unmasked(batch), batch["segments"], batch["global_of"], batch["global_segments"], strict=True
    ):
        seen, expected, expected_segments = [], [], []
        for token, segment in zip(tokens, segments, strict=True):
            if segment and token not in (CLS, SEP) and sentences[token] not in seen:
                seen.append(sentences[token])
                expected_segments.append(segment)
            expected.append(max(len(seen) - 1, 0) if segment else -1)
        over += len(seen) > number
        assert of.tolist() == [place if place < number else -1 for place in expected]
        assert of_globals.tolist() == (expected_segments + [0] * number)[:number]
    assert (over > 0) == (number == 4)


def test_text_without_sentences_is_cut_into_pieces(tmp_path):
    text = numbered([[2 * sentence_globals.LONGEST]])
    corpus = Corpus(write_corpus(tmp_path / "c", text, vocab_size=3000))
    batch = make_examples(SentenceGlobals(300, globals=20), corpus, "train", 1, seed=0).batch(0, np.zeros(1, int))
    pieces = np.repeat(np.arange(16), sentence_globals.PIECE)
    assert batch["global_of"][0].tolist() == [0, *pieces, 15] + [-1] * (300 - 258)
    assert batch["global_segments"][0].tolist() == [1] * 16 + [0] * 4


def test_the_rest_of_a_row_is_that_of_packed_sentences(corpus):
    ours, theirs = (
        epoch(make_examples(layout, corpus, "train", 4, seed=3))
        for layout in (SentenceGlobals(LENGTH, globals=4), PackedSentences(LENGTH))
    )
    assert equal({name: ours[name] for name in theirs}, theirs)
    assert {name: (array.shape[1:], array.dtype) for name, array in ours.items()} == SentenceGlobals(48, globals=4).spec


@pytest.mark.parametrize("number", [0, LENGTH + 1])
def test_no_global_tokens_or_more_than_tokens_are_an_error(number):
    with pytest.raises(UserError, match=f"globals={number} with length={LENGTH}: must be from 1 to {LENGTH}"):
        SentenceGlobals(LENGTH, globals=number)
