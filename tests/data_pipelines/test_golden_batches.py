"""Golden batches: one hash per layout, so that no change of the noise, the order or a row's making passes unseen.

A change here makes other batches of the same corpus, recipe and seed: a run that goes on is another run. After a change
that is meant, put what this prints in place of GOLDEN:

    python -m tests.data_pipelines.test_golden_batches
"""

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.evaluation import evaluation_batches
from tests.data_pipelines.corpora import in_format_1
from tests.data_pipelines.layouts import LAYOUTS, written

BATCH_SIZE = 8
ROWS = np.array([6, 0, 3, 7])  # as a host builds them: some, in any order
GOLDEN = {
    "pairs, next sentence": "9980de8e40aa0781",
    "pairs, sentence order": "54afb31a4926a3e9",
    "pairs, no label": "a060c012ffe3d553",
    "pairs, whole words": "fe9a1826e40ccfec",
    "pairs, masked as ELECTRA's": "ae16c0668180f179",
    "pairs, n-grams as ALBERT's": "4bce5446e9c11199",
    "pairs of sentences": "a929273923fbae48",
    "packed": "8c16f1d578064a42",
    "packed, whole words": "a2e339332e06a4f3",
    "packed, n-grams": "cfceb8478f7417d4",
    "packed across documents": "ab3e30038d0a25a5",
    "packed, of one document": "a1972e0b3455ed10",
    "packed, two fixed copies": "47905a31eec31a33",
    "packed, with global tokens": "e492820617f778b0",
    "pairs, which name global tokens": "9f6d14c102b57935",
    "documents": "f7865c58abc5027f",
    "documents, apart": "17735a3cba09decb",
    "stream": "f2a5ce2dda034efb",
    "stream, reset": "692dc52fbe19f20d",
    "permuted spans": "5e52697bd7201d7f",
    "permuted tokens, one way": "d3812268a78ee418",
}


def digest(layout, corpus: Corpus) -> str:
    """Of two epochs' steps, some rows of each in another order than theirs, and of an evaluation."""
    train = make_examples(layout, corpus, "train", BATCH_SIZE, seed=7)
    steps = 2 * train.number // BATCH_SIZE + 1
    batches = [train.batch(step, ROWS) for step in range(steps)]
    batches += evaluation_batches(make_examples(layout, corpus, "heldout", BATCH_SIZE, seed=7), limit=12)
    found = hashlib.sha256()
    for batch in batches:
        for name, array in sorted(batch.items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return written(tmp_path_factory.mktemp("corpus") / "c")


@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_are_what_they_were(name, corpus):
    assert digest(LAYOUTS[name], corpus) == GOLDEN[name]


@pytest.mark.parametrize("name", ["pairs, whole words", "stream", "permuted spans"])
def test_a_corpus_of_before_there_were_parts_gives_the_same_batches(name, corpus, tmp_path):
    old = Corpus(in_format_1(corpus, tmp_path / "old"))
    assert digest(LAYOUTS[name], old) == GOLDEN[name]


def test_every_layout_is_hashed_and_no_two_are_alike():
    assert GOLDEN.keys() == LAYOUTS.keys() and len(set(GOLDEN.values())) == len(GOLDEN)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        corpus = written(Path(folder) / "c")
        print("GOLDEN = {")
        for name, layout in LAYOUTS.items():
            print(f'    "{name}": "{digest(layout, corpus)}",')
        print("}")
