"""Rows name their first token and their separators as global, and are else those of the layout below."""

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.global_tokens import GlobalTokens
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.segment_pairs import SegmentPairs
from tests.data_pipelines.corpora import epoch, numbered, write_corpus

SEP = 3
RANDOM = Masking(0.5, 0.0, 1.0)  # what is masked becomes a random token, which is never a separator


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    documents = numbered([[5, 6], [3], [9, 2, 4], [30]])
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "c", documents, vocab_size=100))


@pytest.mark.parametrize("number", [1, 2, 4, 24])
@pytest.mark.parametrize("below", [PackedSentences(24, RANDOM), SegmentPairs(24, RANDOM, label=None)])
def test_the_first_token_and_then_the_separators_are_global(corpus, below, number):
    layouts = GlobalTokens(24, below, number), below
    ours, theirs = (epoch(make_examples(layout, corpus, "train", 2, seed=0)) for layout in layouts)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)
    for row, named in zip(theirs["tokens"], ours["globals"], strict=True):
        places = [0, *(place for place, token in enumerate(row) if token == SEP)]
        assert named.tolist() == (places + [-1] * number)[:number]


def test_more_global_tokens_than_the_row_has_are_refused():
    for number in (-1, 33):
        with pytest.raises(UserError, match=f"^globals={number}: must be from 0, for none, to the row's length=32"):
            GlobalTokens(32, PackedSentences(32), number)
