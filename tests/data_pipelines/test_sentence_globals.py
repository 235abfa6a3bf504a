"""Global tokens: one for each sentence of a packed row, documents apart; or those of the row that are named so."""

import dataclasses

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples import packed_sentences
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.packed_sentences import PackedSentences, SentenceGlobals
from data_pipelines.examples.segment_pairs import SegmentPairs
from tests.data_pipelines.corpora import equal, numbered, rows_of, unmasked, write_corpus

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
    batch, sentences = rows_of(layout, corpus), sentence_of_tokens()
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
    text = numbered([[2 * packed_sentences.LONGEST]])
    corpus = Corpus(write_corpus(tmp_path / "c", text, vocab_size=3000))
    batch = make_examples(SentenceGlobals(300, globals=20), corpus, "train", 1, seed=0).batch(0, np.zeros(1, int))
    pieces = np.repeat(np.arange(16), packed_sentences.PIECE)
    assert batch["global_of"][0].tolist() == [0, *pieces, 15] + [-1] * (300 - 258)
    assert batch["global_segments"][0].tolist() == [1] * 16 + [0] * 4


def test_the_rest_of_a_row_is_that_of_packed_sentences(corpus):
    layouts = SentenceGlobals(LENGTH, globals=4), PackedSentences(LENGTH)
    ours, theirs = (rows_of(layout, corpus, 3) for layout in layouts)
    assert equal({name: ours[name] for name in theirs}, theirs)


RANDOM = Masking(0.5, 0.0, 1.0)  # what is masked becomes a random token, which is never a separator


@pytest.mark.parametrize("number", [1, 2, 4, 24])
@pytest.mark.parametrize("below", [PackedSentences(24, RANDOM), SegmentPairs(24, RANDOM, label=None)])
def test_the_first_token_and_then_the_separators_are_global_where_a_layout_names_them(corpus, below, number):
    layouts = dataclasses.replace(below, global_tokens=number), below
    ours, theirs = (rows_of(layout, corpus) for layout in layouts)
    assert equal({name: ours[name] for name in theirs}, theirs)
    for row, named in zip(theirs["tokens"], ours["globals"], strict=True):
        places = [0, *(place for place, token in enumerate(row) if token == SEP)]
        assert named.tolist() == (places + [-1] * number)[:number]
