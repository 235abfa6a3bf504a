"""The loader yields what the examples would, in order, whoever prepares it."""

import threading
import time

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.loader import Loader
from tests.data_pipelines.corpora import equal, random_documents, write_corpus

ROWS = np.array([1, 4, 6])  # one host's rows of a batch of 8


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "c"
    return make_examples(SegmentPairs(16), Corpus(write_corpus(path, random_documents(0, 30))), "train", 8, seed=0)


@pytest.mark.parametrize("workers", [{"threads": 0}, {"threads": 1}, {"threads": 4}, {"processes": 3}])
def test_batches_do_not_depend_on_who_prepares_them(examples, workers):
    first, last = 3, 200  # several groups of steps, the last not full, over an epoch's end
    with Loader(examples, first, last, ROWS, **workers) as loader:
        steps = list(loader)
    assert [step for step, _ in steps] == list(range(first, last))
    assert all(equal(batch, examples.batch(step, ROWS)) for step, batch in steps)


def test_large_batches_are_built_one_by_one(examples):
    rows = np.arange(300)
    with Loader(examples, 0, 3, rows) as loader:
        assert all(equal(batch, examples.batch(step, rows)) for step, batch in loader)


class Failing:
    batch_size = together = 8

    def batch(self, step, rows):
        raise UserError("the disk is gone")


@pytest.mark.parametrize("workers", [{"threads": 0}, {"threads": 2}, {"processes": 1}])
def test_what_fails_in_a_worker_arrives_as_it_was(workers):
    with pytest.raises(UserError, match="^the disk is gone$"), Loader(Failing(), 0, 5, ROWS, **workers) as loader:
        next(iter(loader))


def test_leaving_the_loader_early_stops_its_threads(examples):
    before = threading.active_count()
    with Loader(examples, 0, 10**9, ROWS, threads=4) as loader:
        assert next(iter(loader))[0] == 0
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_no_steps_are_no_batches(examples):
    with Loader(examples, 5, 5, ROWS) as loader:
        assert list(loader) == []
