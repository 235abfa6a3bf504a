"""Trackers of `run --track`: what they are told, on resume, by which process, and when they fail."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from pretrain.__main__ import main
from pretrain.storage.journal import open_journal, read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import start
from pretrain.training.run import run
from tests.pretrain import tiny, toys


class Recorded:
    """A package that keeps what it is told, as wandb's and trackio's do."""

    def __init__(self):
        self.started, self.logged, self.finished, self.fails = [], [], 0, ""

    def Settings(self, **settings):
        return settings

    def init(self, project=None, name=None, **about):
        self._fail_in("init")
        self.started.append({"project": project, "name": name, **about})
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, figures, step):
        self._fail_in("log")
        self.logged.append((step, figures))

    def finish(self):
        self._fail_in("finish")
        self.finished += 1

    def _fail_in(self, call):
        if self.fails == call:
            raise ConnectionError("no network")


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request, monkeypatch):
    """(name, the package)."""
    package = Recorded()
    monkeypatch.setitem(sys.modules, request.param, package)
    return request.param, package


WANDB = pytest.mark.parametrize("tracker", ["wandb"], indirect=True)  # what both are used for alike


def train(corpus_path, workdir, *names, steps=8, **changes):
    options = tiny.options(corpus_path, workdir, track=names, log_every=1, checkpoint_every=4, **changes)
    return run(toys.recipe(steps=steps), options)


def steps_of(package, kind="train"):
    return [step for step, figures in package.logged if all(name.startswith(f"{kind}/") for name in figures)]


def test_a_tracker_is_told_the_recipe_and_every_figure_of_its_step(registered, tracker, corpus_path, tmp_path):
    name, package = tracker
    assert train(corpus_path, tmp_path / "run", name) == 0
    (about,) = package.started
    assert about["project"] == "pretrain" and about["config"] == json.loads((tmp_path / "run/recipe.json").read_text())
    assert about["resume"] == "allow" and about["name"].startswith("run") and package.finished == 1
    metrics = read_metrics(RunDirectory(tmp_path / "run"), "train") + read_metrics(
        RunDirectory(tmp_path / "run"), "eval"
    )
    told = [{"kind": kind, "step": step} | {name.split("/", 1)[1]: value for name, value in figures.items()}
            for step, figures in package.logged for kind in {name.split("/")[0] for name in figures}]  # fmt: skip
    assert told == metrics and steps_of(package) == [*range(1, 9)] and steps_of(package, "eval") == [8]


def test_a_run_goes_on_in_the_same_one_of_the_tracker_which_is_told_nothing_twice(
    registered, tracker, corpus_path, tmp_path
):
    name, package = tracker
    train(corpus_path, tmp_path / "run", name)
    directory = RunDirectory(tmp_path / "run")
    for entry in range(9, 11):  # as if a kill had come after step 10, beyond the last checkpoint
        with directory.metrics.open("a") as file:
            file.write(json.dumps({"kind": "train", "step": entry, "loss": 1.0}) + "\n")
    train(corpus_path, tmp_path / "run", name, steps=12)
    assert steps_of(package) == [*range(1, 9), 11, 12]
    assert [entry["step"] for entry in read_metrics(directory, "train")] == [*range(1, 13)]
    first, second = ({key: about.get(key) for key in ("id", "name", "project")} for about in package.started)
    assert first == second and json.loads(directory.trackers.read_text())[name] in str(first)


@WANDB
def test_a_tracker_that_comes_later_is_told_all_that_follows(registered, tracker, corpus_path, tmp_path):
    name, package = tracker
    train(corpus_path, tmp_path / "run")
    assert not RunDirectory(tmp_path / "run").trackers.exists()
    with RunDirectory(tmp_path / "run").metrics.open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 9, "loss": 1.0}) + "\n")
    train(corpus_path, tmp_path / "run", name, steps=12)
    assert steps_of(package) == [9, 10, 11, 12]


@WANDB
def test_where_it_is_no_longer_known_which_one_it_was_a_new_one_begins_and_that_is_said(tracker, tmp_path, capsys):
    name, package = tracker
    directory = RunDirectory(tmp_path)
    directory.recipe.write_text("{}")
    for damaged in (False, True):
        open_journal(directory, 0, 10, (name,)).close()
        said = f"trackers.json: is damaged; --track {name} starts a new run\n"
        assert (said in capsys.readouterr().out) == damaged
        known_as = json.loads(directory.trackers.read_text())[name]
        assert package.started[-1]["id"] == known_as
        directory.trackers.write_text('{"wandb": ')
    assert len({about["id"] for about in package.started}) == 2


@pytest.mark.parametrize(
    "tracker, call", [("wandb", "init"), ("trackio", "log"), ("wandb", "finish")], indirect=["tracker"]
)
def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(
    registered, tracker, corpus_path, tmp_path, capsys, call
):
    name, package = tracker
    package.fails = call
    assert train(corpus_path, tmp_path / "run", name) == 0
    said = capsys.readouterr().out
    assert said.count(f"--track {name}: failed (ConnectionError('no network')); the run continues without it") == 1
    assert len(read_metrics(RunDirectory(tmp_path / "run"), "train")) == 8


@WANDB
def test_only_the_first_process_tracks(registered, tracker, corpus_path, tmp_path, monkeypatch):
    name, package = tracker
    monkeypatch.setattr(start, "is_first", lambda: False)
    train(corpus_path, tmp_path / "run", name)
    assert package.started == []


def test_the_project_is_the_environment_s(tracker, tmp_path, monkeypatch):
    name, package = tracker
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    (tmp_path / "recipe.json").write_text("{}")
    open_journal(RunDirectory(tmp_path), 0, 10, (name, name)).close()
    assert [about["project"] for about in package.started] == ["mine"] and package.finished == 1


def test_a_tracker_that_is_unknown_or_not_installed_is_one_line_before_the_run(tmp_path, capsys, monkeypatch):
    given = ["run", "bert-tiny", "--corpus", str(tmp_path), "--workdir", str(tmp_path / "run"), "--track"]
    assert main([*given, "wandbb"]) == 2
    assert "--track: unknown tracker wandbb; did you mean wandb?" in capsys.readouterr().err
    monkeypatch.setattr("pretrain.commands.run.find_spec", lambda name: None)
    assert main([*given, "trackio"]) == 2
    assert "--track trackio: the package is not installed; run `pip install trackio`" in capsys.readouterr().err


def test_weights_and_biases_itself_keeps_a_run_on_this_machine(registered, corpus_path, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert train(corpus_path, tmp_path / "run", "wandb") == 0
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert os.path.getsize(next(kept.glob("run-*.wandb"))) > 1000
