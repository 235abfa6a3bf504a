"""SIGTERM and SIGINT: a checkpoint of the step at hand, exit status 75, and the same command goes on."""

import os
import signal

import pytest

from pretrain.signals import EXIT_STOPPED, stop_request
from tests.pretrain import tiny
from tests.pretrain.test_kills import reached


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_request_and_the_old_handlers_come_back(number):
    before = signal.getsignal(number)
    with stop_request() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop and stop.signal == number.name
        assert signal.getsignal(number) == signal.SIG_DFL  # a second one ends the process
    assert signal.getsignal(number) == before


def interrupted(corpus_path, workdir, number, step, *more):
    """Send a real run a signal after a step, as a terminal does: to the whole process group -> (status, output)."""
    process = tiny.start(*tiny.run_arguments(corpus_path, workdir, "--checkpoint-every", 1000, *more))
    while not reached(workdir, step) and process.poll() is None:
        pass
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_a_run_stopped_twice_ends_as_if_it_never_was(corpus_path, tmp_path, uninterrupted):
    workdir, seen = tmp_path / "run", []
    for number, step, more in ((signal.SIGTERM, 3, ()), (signal.SIGINT, 20, ("--workers", 2))):
        status, out, err = interrupted(corpus_path, workdir, number, step, *more)
        assert status == EXIT_STOPPED == 75, err
        assert "Traceback" not in err
        stopped = int(tiny.final_state(workdir).step)
        assert f"{number.name}: saved step {stopped}" in out
        seen.append(stopped)
    assert 3 <= seen[0] < seen[1] < 40
    status, out, err = tiny.run_command(*tiny.run_arguments(corpus_path, workdir, "--workers", 1))
    assert (status, err) == (0, "")
    assert f"resuming from step {seen[1]}" in out
    assert tiny.equal(tiny.final_state(workdir), tiny.final_state(uninterrupted))
