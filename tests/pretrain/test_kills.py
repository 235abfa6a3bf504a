"""A run that is stopped or killed anywhere and started again ends as one that was left alone."""

import json
import os
import shutil
import signal
import threading
import time

import jax
import pytest

from data_pipelines.errors import UserError
from pretrain.__main__ import main
from pretrain.recipe import to_json
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import loop
from pretrain.training.run import run
from pretrain.training.signals import EXIT_STOPPED, stop_request
from tests.pretrain import tiny, toys
from tpu import cluster

STEPS = 24

# `python -m pretrain`, so slow that a signal finds it at work. Last it prints what it has imported of the cloud's
# libraries.
SLOWLY = """
import sys, time
import pytest
from pretrain.__main__ import main
from pretrain.training import loop
from tests.pretrain import toys

def place_rows(*given, at_once=loop.place_rows):
    time.sleep(0.1)
    return at_once(*given)

toys.register(pytest.MonkeyPatch())
loop.place_rows = place_rows
status = main(sys.argv[1:])
print({name.split(".")[0] for name in sys.modules} & {"gcsfs", "aiohttp"} or "of the cloud: nothing")
sys.exit(status)
"""


@pytest.fixture
def training(corpus_path, tmp_path, monkeypatch):
    """(work directory, more options) -> arguments of `python -m pretrain` to train the toy there."""
    toys.register(monkeypatch)
    recipe = tmp_path / "recipe.json"
    recipe.write_text(to_json(toys.recipe(steps=STEPS)))

    def arguments(workdir, *more):
        cadence = ["--checkpoint-every", 4, "--log-every", 1, "--eval-every", 5]
        options = [*cadence, "--keep", 1, "--keep-best", "--eval-examples", 16, *more]
        return [*map(str, ["run", "--recipe", recipe, "--corpus", corpus_path, *options, "--workdir", workdir])]

    return arguments


def reached(workdir, step) -> bool:
    """Whether the run has written figures of this step (they are written as they come)."""
    metrics = RunDirectory(workdir).metrics
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return any(line.endswith("\n") and json.loads(line)["step"] >= step for line in lines)


def interrupted(arguments, workdir, number, step):
    """Send a signal to the process group, as a terminal does, after a step -> (status, output, errors)."""
    process = tiny.start(*arguments, program=("-c", SLOWLY))
    deadline = time.monotonic() + 400
    while not reached(workdir, step) and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.01)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def figures(workdir):
    """(kind, step, loss) of every measurement."""
    entries = map(json.loads, RunDirectory(workdir).metrics.read_text().splitlines())
    return [(entry["kind"], entry["step"], entry["loss"]) for entry in entries]


def test_a_run_that_is_stopped_and_killed_ends_as_if_nothing_had_happened(training, tmp_path, capsys):
    workdir, whole = tmp_path / "run", tmp_path / "whole"
    at_first = training(workdir, "--checkpoint-every", 1000, "--workers", 1)
    status, out, err = interrupted(at_first, workdir, signal.SIGINT, step=3)
    assert status == EXIT_STOPPED == 75 and "Traceback" not in err, err
    stopped = int(tiny.final_state(workdir).step)
    assert 3 <= stopped < STEPS - 8 and f"SIGINT: saved step {stopped}" in out
    assert out.endswith("of the cloud: nothing\n")
    status, *_ = interrupted(training(workdir), workdir, signal.SIGKILL, step=stopped + 5)
    assert status == -signal.SIGKILL
    assert main(training(workdir)) == main(training(whole)) == 0  # of the two, the one goes on
    assert capsys.readouterr().out.count("resuming from step") == 1
    assert tiny.equal(tiny.final_state(workdir), tiny.final_state(whole))
    assert figures(workdir) == figures(whole)
    assert RunDirectory(workdir).checkpoint_steps() == RunDirectory(whole).checkpoint_steps() == [20, 24]


def test_a_signal_before_the_first_step_of_a_resumed_run_loses_nothing(corpus_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    workdir, left, gone = tmp_path / "run", tmp_path / "left", threading.Event()
    go = lambda steps, stop=None: run(toys.recipe(steps=steps), tiny.options(corpus_path, workdir), stop)
    go(5)
    state, measured = tiny.final_state(workdir), figures(workdir)

    def leave(status):  # the process would end here
        shutil.copytree(workdir, left / str(status))
        gone.set()
        raise jax.errors.JaxRuntimeError

    def signalled(*_):
        signal.raise_signal(signal.SIGTERM)
        assert gone.wait(60)
        raise UserError("gone")

    monkeypatch.setattr(cluster, "leave", leave)
    monkeypatch.setattr(loop, "_train_phase", signalled)
    with stop_request() as stop, pytest.raises(UserError, match="gone"):
        go(10, stop)
    assert tiny.equal(tiny.final_state(left / str(EXIT_STOPPED)), state)
    assert figures(left / str(EXIT_STOPPED)) == measured
