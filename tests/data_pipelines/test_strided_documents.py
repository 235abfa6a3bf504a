"""Rows of whole documents, each token predicted once, as the usual loop with a stride does."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipelines.__main__ import main
from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.strided_documents import StridedDocuments
from data_pipelines.tokenizers import stored
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3), separate=st.booleans(), restart=st.booleans())
def test_the_end_token_before_a_document_is_of_another_one(tmp_path_factory, sizes, separate, restart):
    documents = numbered([[size] for size in sizes])
    corpus = Corpus(write_corpus(tmp_path_factory.mktemp("c") / "c", documents, 5000, special=SPECIAL | {"eod": EOD}))
    layout = StridedDocuments(8, 3, separate, restart)
    found = epoch(make_examples(layout, corpus, "train", 1, seed=0))
    assert {name: (array.shape[1:], array.dtype) for name, array in found.items()} == layout.spec
    for number, tokens in enumerate(found["tokens"]):
        first, size = tokens[0] == EOD, (tokens > 0).sum()
        segments = [1] + [1 + (first and separate)] * (size - 1) + [0] * (8 - size)
        assert found["segments"][number].tolist() == segments
        if restart:
            assert found["positions"][number].tolist() == ([0, *range(7)] if first else [*range(8)])


def test_every_row_begins_with_its_documents_code(tmp_path):
    lines = [{"domain": "Law", "text": "abcdefghijk"}, {"domain": "Food", "text": "xyz"}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["prepare", "--source", f"jsonl:{tmp_path}/lines.jsonl", "--tokenizer", "bytes", "--heldout", "0"]
    command += ["--out", str(tmp_path / "c"), "--code-field", "domain", "--code", "Law", "--code", "Food"]
    assert main(command) == 0
    corpus = Corpus(tmp_path / "c")
    law, food, end = (corpus.special[role] for role in ("code_Law", "code_Food", "sep"))
    encode = lambda text: stored.load(corpus.tokenizer_path).tokenizer.encode(text, add_special_tokens=False).ids
    found = epoch(make_examples(StridedDocuments(6, 4, separate=True, restart=True), corpus, "train", 1, seed=0))
    assert found["tokens"].tolist() == [
        [law, *encode("abcde")],
        [law, *encode("efghi")],
        [law, *encode("ijk"), 0, 0],
        [food, *encode("xyz"), 0, 0],
    ]
    assert found["targets"].tolist() == [
        encode("abcdef"),
        encode("efghij"),
        [*encode("ijk"), end, 0, 0],
        [*encode("xyz"), end, 0, 0],
    ]
    assert found["weights"].tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert found["segments"].max() == 1 and (found["positions"] == range(6)).all()
