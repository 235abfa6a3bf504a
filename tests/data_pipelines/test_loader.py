"""The loader yields what the examples would, in order, whoever prepares it."""

import threading
import time

import numpy as np
import pytest

from data_pipelines import batches
from data_pipelines.batches import MOST, TOKENS, make_examples, together
from data_pipelines.batches import ROWS as MANY
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


@pytest.fixture
def small(monkeypatch):
    """Groups of 64 rows, in place of thousands."""
    monkeypatch.setattr(batches, "ROWS", 64)
    monkeypatch.setattr(batches, "TOKENS", 1)


@pytest.mark.parametrize("workers", [{"threads": 0}, {"threads": 1}, {"threads": 4}, {"processes": 3}])
def test_batches_do_not_depend_on_who_prepares_them(examples, workers, small):
    first, last = 3, 200  # several groups of steps, the last not full, over an epoch's end
    with Loader(examples, first, last, ROWS, **workers) as loader:
        assert loader._group == 64 // 3 and (last - first) % loader._group
        steps = list(loader)
    assert [step for step, _ in steps] == list(range(first, last))
    assert all(equal(batch, examples.batch(step, ROWS)) for step, batch in steps)


def test_large_batches_are_built_one_by_one(examples, small):
    rows = np.arange(300)
    with Loader(examples, 0, 3, rows) as loader:
        assert loader._group == 1
        assert all(equal(batch, examples.batch(step, rows)) for step, batch in loader)


def test_more_rows_are_built_together_where_a_batch_is_of_more_parts():
    assert together(1, 512) == MANY and together(1, 32) == TOKENS // 32
    assert together(5, 512) == 5 * MANY and together(100, 512) == MOST // 512
    assert together(100, 65_536) == MANY


class Failing:
    batch_size = together = 8
    corpora = ()

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
