"""The loader yields what the examples would, in order, whoever prepares it, and leaves no process behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from data_pipelines import batches
from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.loader import Loader
from data_pipelines.processes import Workers
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


@pytest.mark.parametrize("workers", [{"threads": 0}, {"threads": 1}, {"threads": 4}, {"processes": 2}])
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


READER = """
import multiprocessing, os, sys
from functools import partial
from data_pipelines.processes import Workers
if __name__ == "__main__":
    things = iter(Workers(bytes, 10**9, int(sys.argv[1])))
    for _ in range(3):
        next(things)
    print(len(multiprocessing.active_children()), flush=True)
    exec(sys.argv[2])
"""


@pytest.fixture(autouse=True)
def alone():
    """Processes of tests before these may still be ending."""
    for child in multiprocessing.active_children():
        child.join(60)


# What these build, `bytes`, is found without this file, whose imports take a process seconds.


@pytest.mark.parametrize("processes, number", [(3, 5), (6, 2)])
def test_things_come_in_order_and_the_processes_end(processes, number):
    workers = Workers(bytes, number, processes)
    assert list(map(len, workers)) == [*range(number)]
    workers.close()
    assert multiprocessing.active_children() == []


def test_signals_to_the_whole_group_are_the_readers_alone():
    workers = Workers(bytes, 2000, 2)
    children = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT):
        for child in children:  # while they start
            os.kill(child.pid, number)
    assert len(list(workers)) == 2000
    workers.close()
    assert len(children) == 2 and [child.exitcode for child in children] == [0, 0]


def more_than_a_pipe_holds(index):
    return bytes(10**6)


def test_a_process_that_is_killed_in_the_middle_of_a_message_is_the_same_error():
    workers = Workers(more_than_a_pipe_holds, 5, 1)
    process, pipe = workers._workers[0]
    assert pipe.poll(60)
    process.kill()
    with pytest.raises(UserError, match="^--workers 1: .* ended with status -9, "):
        list(workers)
    workers.close()


@pytest.mark.parametrize(
    ("processes", "end", "status"),
    [(2, "pass", 0), (2, "sys.exit(3)", 3), (1, "1 / 0", 1), (3, "os.kill(os.getpid(), 9)", -9)],
)
def test_nothing_is_left_however_the_reader_ends(tmp_path, processes, end, status):
    script = tmp_path / "reader.py"
    script.write_text(READER)
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script, str(processes), end], env=environment, capture_output=True, text=True, timeout=300
    )  # its workers share its output: it comes to an end when they have
    assert (done.returncode, done.stdout) == (status, f"{processes}\n")
    assert "ZeroDivisionError" in done.stderr if end == "1 / 0" else done.stderr == ""
    assert "leaked" not in done.stderr
    assert not shared or not {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("psm_")}
