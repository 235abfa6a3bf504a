"""A run that is killed anywhere and started again ends with the parameters of one that was never killed."""

import json
import random
import time

import pytest

from pretrain.storage.run_directory import RunDirectory
from tests.pretrain import tiny

STEPS = 40


def reached(workdir, step) -> bool:
    """Whether the run has written figures of this step (they are written as they come)."""
    metrics = RunDirectory(workdir).metrics
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return any(line.endswith("\n") and json.loads(line)["step"] >= step for line in lines)


def kill_at(step, arguments, workdir, delay=0.0) -> None:
    """Start the run, wait for a step and a moment more, kill it."""
    process = tiny.start(*arguments)
    deadline = time.monotonic() + 400
    while not reached(workdir, step) and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.communicate()


def figures(workdir):
    """(kind, step) -> loss, of every measurement."""
    entries = map(json.loads, RunDirectory(workdir).metrics.read_text().splitlines())
    return [(entry["kind"], entry["step"], entry["loss"]) for entry in entries]


def check(corpus_path, workdir, kills, uninterrupted):
    """kills: (step, seconds after it, more arguments), one after the other; then the run goes on to its end."""
    for step, delay, more in kills:
        kill_at(step, tiny.run_arguments(corpus_path, workdir, *more), workdir, delay)
    status, out, err = tiny.run_command(*tiny.run_arguments(corpus_path, workdir))
    assert status == 0, err
    assert "resuming from step" in out
    assert tiny.equal(tiny.final_state(workdir), tiny.final_state(uninterrupted))
    assert figures(workdir) == figures(uninterrupted)  # as if nothing had happened


def test_two_kills_one_of_them_with_worker_processes(corpus_path, tmp_path, uninterrupted):
    check(corpus_path, tmp_path / "run", [(6, 0.0, ()), (19, 0.0, ("--workers", 2))], uninterrupted)


def test_a_decoder_that_is_killed_ends_as_if_it_had_not_been(corpus_path, tmp_path):
    arguments = lambda name: tiny.run_arguments(corpus_path, tmp_path / name, "--steps", 24, recipe="gpt2-tiny")
    kill_at(18, arguments("killed"), tmp_path / "killed")
    for name in ("whole", "killed"):
        status, out, err = tiny.run_command(*arguments(name))
        assert status == 0, err
    assert "resuming from step" in out
    assert tiny.equal(*(tiny.final_state(tmp_path / name) for name in ("whole", "killed")))
    assert figures(tmp_path / "whole") == figures(tmp_path / "killed")


@pytest.mark.slow
def test_five_kills_at_random_with_0_to_3_worker_processes(corpus_path, tmp_path, uninterrupted):
    rng = random.Random(0)
    steps = sorted(rng.sample(range(5, STEPS - 2), 5))
    kills = [(step, rng.random() * 0.02, ("--workers", index % 4)) for index, step in enumerate(steps)]
    check(corpus_path, tmp_path / "run", kills, uninterrupted)
