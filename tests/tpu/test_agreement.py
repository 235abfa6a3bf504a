"""What several processes decide together: tried with threads around a stand-in for JAX's key-value store."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from data_pipelines.errors import PassingError, UserError
from pretrain.options import Options
from pretrain.training.run import opened as corpora_of
from pretrain.training.signals import EXIT_STOPPED, StopRequest
from tests.data_pipelines.corpora import random_documents, write_corpus
from tpu import chatter, cluster


class Store:
    """The calls of JAX's client that are used, over one dict."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def key_value_delete(self, key):
        with self.changed:
            del self.values[key]

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout=5):
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: nobody came")
            return self.values[key]

    def key_value_dir_get(self, folder):
        with self.changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(f"{folder}/")]


STATUSES = [(BrokenPipeError(), 1), (SystemExit(1), 1), (UserError("full"), 2), (PassingError("busy"), 134)]


class Left(Exception):
    """A process that ended, in place of its end."""


def leave(status):
    raise Left(status)


def gone(*_, said="FAILED_PRECONDITION: Agent must be in CONNECTED state. It is currently in ERROR.", **__):
    """What the client says when the first process has died; there are other words for it."""
    raise jax.errors.JaxRuntimeError(said)


def wait():
    cluster.gather("x", lambda: 1)


def wait_as_orbax_does():
    """Its words for any error of its barrier."""
    try:
        gone(said="UNAVAILABLE: Socket closed")
    except jax.errors.JaxRuntimeError as error:
        raise TimeoutError("Timed out while waiting for async_commit_complete barrier.") from error


@pytest.mark.parametrize("wait", [wait, wait_as_orbax_does])
def test_a_process_that_waits_for_the_first_when_that_dies_says_so_in_one_line(wait, processes, monkeypatch, capfd):
    monkeypatch.setattr(cluster, "leave", leave)
    monkeypatch.setattr(cluster, "FAREWELL_SECONDS", 0)
    two = processes(2)
    monkeypatch.setattr(two.store, "blocking_key_value_get", gone)

    def end(process):
        with cluster.ending_together():
            wait()

    _, second = two.run(lambda process: end(process) if process else None)
    assert second.args == (PassingError.status,) and capfd.readouterr().err == f"{chatter.LOST}\n"


@pytest.mark.parametrize("error, status", STATUSES[2:])
def test_the_others_end_with_a_status_that_says_whether_to_start_again(error, status, processes, monkeypatch, capsys):
    left = []
    monkeypatch.setattr(cluster, "leave", left.append)
    two = processes(2)

    def end(process):
        with cluster.ending_together():
            raise error

    two.run(lambda process: end(process) if process else None)
    two.run(lambda process: None if process else cluster.end_with_others())
    assert left == [status, status] and f"process 1 ended, and this one with it: {error}" in capsys.readouterr().err


class Processes:
    """Functions run as the processes of one cluster, each in a thread."""

    def __init__(self, number, monkeypatch):
        self.number, self.store, self.here = number, Store(), threading.local()
        monkeypatch.setattr(cluster, "_here", lambda: self.here.place)
        monkeypatch.setattr(cluster, "_numbers", self)
        cluster._joined.set()

    def __next__(self):
        self.here.count = getattr(self.here, "count", -1) + 1
        return self.here.count

    def place(self, process):
        self.here.place = types.SimpleNamespace(process_id=process, num_processes=self.number, client=self.store)

    def run(self, function):
        """function(process) of each -> what it returned or raised."""

        def one(process):
            self.place(process)
            try:
                return function(process)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(one, range(self.number)))


@pytest.fixture
def processes(monkeypatch):
    yield lambda number: Processes(number, monkeypatch)
    cluster._joined.clear()


def test_what_all_find_alike_is_agreed_on_time_after_time(processes):
    three = processes(3)
    assert (
        three.run(lambda process: [cluster.agree("x", lambda i=i: {"n": [i]}) for i in range(4)])
        == [[{"n": [i]} for i in range(4)]] * 3
    )
    assert len(three.store.values) == 3  # what everybody has read is deleted


def test_a_process_that_finds_something_else_is_named_everywhere(processes):
    found = processes(3).run(lambda process: cluster.agree("--corpus", lambda: {"seed": 1, "steps": process // 2}))
    assert {type(error) for error in found} == {UserError}
    assert {str(error) for error in found} == {
        "--corpus: process 2 has steps=1 where process 0 has 0; give all hosts the same"
    }


@pytest.mark.parametrize("error", [UserError("no file"), PassingError("busy"), ConnectionError("503"), MemoryError()])
def test_the_failure_of_one_is_an_error_in_all(error, processes):
    def decide(process):
        if process == 1:
            raise error
        return 1

    first, second = processes(2).run(lambda process: cluster.agree("reading", lambda: decide(process)))
    assert second is error
    assert isinstance(first, UserError) and str(first) == f"process 1: {str(error) or 'MemoryError'}"
    assert isinstance(first, PassingError) == isinstance(error, PassingError)


def test_the_first_decides_for_all_and_fails_for_all(processes):
    asked = []
    two = processes(2)
    decide = lambda process: asked.append(process) or "done"
    assert two.run(lambda process: cluster.from_first("x", lambda: decide(process))) == ["done"] * 2
    assert asked == [0]


def test_processes_that_ask_different_questions_do_not_take_each_other_s_answers(processes):
    errors = processes(2).run(lambda process: cluster.agree(f"question {process}", lambda: 1))
    assert {type(error) for error in errors} == {RuntimeError} and "is at 'question 1'" in str(errors[0])


def stop_at(three, requests, steps):
    """Three processes at these steps, of which the second gets SIGTERM -> the step before which each stops."""

    def settle(process):
        if steps[process] is not None:
            requests[process].reached(steps[process])
        requests[process].settle("SIGTERM")
        return next(step for step in range(steps[process], 99) if requests[process].reached(step))

    return three.run(settle)


def test_all_stop_before_the_same_step_wherever_they_are(processes):
    requests = [StopRequest() for _ in range(3)]
    assert stop_at(processes(3), requests, [7, 9, 8]) == [10] * 3
    assert [request.signal for request in requests] == ["SIGTERM"] * 3


def test_a_process_that_is_ahead_waits_until_all_have_said_where_they_are(processes):
    three, ahead = processes(2), StopRequest()
    ahead.reached(5)
    asked = threading.Event()

    def process(index):
        if index == 0:
            asked.set()
            ahead.settle("SIGTERM")
            return None
        asked.wait()
        late = StopRequest()
        late.reached(11)
        late.settle("SIGTERM")
        return late.reached(12) and ahead.reached(12) and not ahead.reached(11)

    assert three.run(process)[1]


def test_before_the_first_step_of_one_all_end_at_once(processes, monkeypatch, capsys):
    def stop(process):
        request = StopRequest()
        if process:
            request.reached(100)  # it has compiled sooner than the first
        request.settle("SIGTERM")

    monkeypatch.setattr(cluster, "leave", leave)
    found = processes(3).run(stop)
    assert [(type(error), error.args) for error in found] == [(Left, (EXIT_STOPPED,))] * 3
    assert capsys.readouterr().out.count("SIGTERM: stopped before the first step") == 1


def test_two_hosts_with_corpora_of_their_own_do_not_train_together(processes, corpus_path, tmp_path):
    write_corpus(tmp_path / "other", random_documents(0, documents=20))
    paths = [corpus_path, tmp_path / "other"]
    found = processes(2).run(lambda process: corpora_of(Options(corpus=str(paths[process]), workdir=tmp_path / "run")))
    assert {type(error) for error in found} == {UserError}
    assert "the fingerprint of --corpus: process 1 has" in str(found[0]) and not (tmp_path / "run").exists()
