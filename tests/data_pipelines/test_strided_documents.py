"""Rows of whole documents, each token predicted once, as the usual loop with a stride does."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.strided_documents import StridedDocuments
from tests.data_pipelines.corpora import SPECIAL, epoch, numbered, write_corpus

EOD = 4999


def strided(text, length, stride):
    """The loop of https://huggingface.co/docs/transformers/perplexity over a text and the end tokens around it:
    (tokens, targets, which of these are scored) of each row."""
    tokens, done = [EOD, *text, EOD], 0
    for begin in range(0, len(tokens) - 1, stride):
        end = min(begin + length, len(tokens) - 1)
        yield tokens[begin:end], tokens[begin + 1 : end + 1], [place >= done for place in range(begin, end)]
        done = end
        if end == len(tokens) - 1:
            return


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), length=st.integers(1, 12), data=st.data())
def test_rows_are_the_loops(tmp_path_factory, sizes, length, data):
    stride = data.draw(st.integers(1, length))
    documents = numbered([[size] for size in sizes])
    folder = write_corpus(tmp_path_factory.mktemp("c") / "c", documents, 5000, special=SPECIAL | {"eod": EOD}, parts=2)
    found = epoch(make_examples(StridedDocuments(length, stride), Corpus(folder), "train", 1, seed=0))
    expected = [row for (text,) in documents for row in strided(text, length, stride)]
    assert len(found["tokens"]) == len(expected)
    for number, (tokens, targets, scored) in enumerate(expected):
        padding = [0] * (length - len(tokens))
        for name, values in {"tokens": tokens, "targets": targets, "weights": scored}.items():
            assert found[name][number].tolist() == [*values, *padding], (number, name)
        assert found["segments"][number].tolist() == [1] * len(tokens) + padding
    assert found["weights"].sum() == sum(sizes) + len(sizes)


def test_a_stride_beyond_the_row_leaves_tokens_out_and_is_refused():
    with pytest.raises(UserError, match="--stride 9: give a number from 1 to the length of the rows, 8"):
        StridedDocuments(8, 9)
