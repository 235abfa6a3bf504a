"""Text with spans replaced and pairs of an input and a target, by one encoder and decoder: whole runs."""

import importlib
import io
import json
import math
import shutil
from types import SimpleNamespace

import pytest
from rich.console import Console

from data_pipelines.corpus import open_corpora
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from pretrain.__main__ import main
from pretrain.objectives.objective import Task
from pretrain.objectives.sequence_to_sequence import PhaseWithTargets, SequenceToSequence
from pretrain.recipe import to_json
from pretrain.schedules import Schedule
from pretrain.storage.best import best, losses
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import evaluate, opened
from pretrain.training.data import task_rates
from pretrain.training.opened import best_steps, open_model, restore
from pretrain.training.run import run
from tests.pretrain import tiny, toys
from tests.pretrain.test_checkpoints import DAMAGES
from tests.texts import write_texts


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """`--corpus` of text and of pairs, in bytes. Tests must not change them."""
    folder = tmp_path_factory.mktemp("corpora")
    source = write_texts(folder / "texts", documents=60, seed=0)
    words = [{"input": f"word {number}", "target": f"WORD {number}"} for number in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in words))
    pairs = {"field": ("input", "target"), "task_prefix": ("upper: ",)}
    for spec, name, more in ((f"text:{source}", "text", {}), (f"jsonl:{folder}/pairs.jsonl", "pairs", pairs)):
        options = Prepare((spec,), folder / name, tokenizer="bytes", heldout=0.2, processes=1, **more)
        prepare(options, Console(file=io.StringIO()))
    return f"text={folder}/text,pairs={folder}/pairs"


def recipe(steps):
    tasks = (
        Task("spans", SequenceToSequence(), corpus="text"),
        Task("upper", SequenceToSequence("input-target"), corpus="pairs"),
    )
    phase = PhaseWithTargets(1.0, 32, 8, target_length=tiny.TARGET, tasks=tasks, rates="proportional:50")
    return tiny.t5(phases=(phase,), steps=steps, schedule=Schedule("constant", peak=1e-3, warmup=0.0))


def evaluations(workdir):
    return {figures["step"]: figures for figures in read_metrics(RunDirectory(workdir), "eval")}


def bests(recipe, figures, steps):
    return best(recipe, {step: losses(recipe, of) for step, of in figures.items()}, steps)


@pytest.mark.slow
def test_tasks_of_text_and_pairs_go_on_bit_for_bit(corpora, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = {"log_every": 6, "checkpoint_every": 4, "eval_every": 3, "keep": 1, "keep_best": True}
    go = lambda workdir, steps: run(recipe(steps), tiny.options(corpora, workdir, **options))
    assert go(whole, 12) == go(cut, 7) == go(cut, 12) == 0
    assert tiny.equal(tiny.final_state(whole), tiny.final_state(cut))
    found = evaluations(whole)
    assert {step: found[step] for step in (3, 6, 9, 12)} == {step: evaluations(cut)[step] for step in (3, 6, 9, 12)}
    rates = task_rates(recipe(12), open_corpora(corpora, {}), 0)
    assert rates["upper"] == pytest.approx(48 / 98, abs=0.05)  # of 60 pairs those that are not held out
    assert found[12]["loss"] == pytest.approx(sum(rate * found[12][f"{name}/loss"] for name, rate in rates.items()))


def test_of_tasks_of_text_and_pairs_the_best_of_each_stays(corpora, tmp_path, capsys):
    options = {"log_every": 6, "checkpoint_every": 4, "eval_every": 3, "keep": 1, "keep_best": True}
    assert run(recipe(12), tiny.options(corpora, tmp_path, **options)) == 0
    found = evaluations(tmp_path)
    of_each = bests(recipe(12), found, found)
    assert of_each.keys() == {"loss", "spans", "upper"}
    assert {*of_each.values(), 12} <= {*RunDirectory(tmp_path).checkpoint_steps()} <= {9, 12}
    step, *_ = best_steps(RunDirectory(tmp_path), "upper")
    assert main(["eval", str(tmp_path), "--best", "upper"]) == 0
    said = capsys.readouterr().out
    assert f"step {step}" in said and f"{found[step]['upper/loss']:.4f}" in said
    assert open_model(tmp_path, best_of="spans").step == best_steps(RunDirectory(tmp_path), "spans")[0]


def test_a_task_of_several_corpora_has_one_loss_by_their_rates(corpora, monkeypatch):
    causal = SequenceToSequence("causal")
    tasks = Task("one", causal, corpus="text"), Task("all", causal)
    phase = PhaseWithTargets(1.0, 32, 8, target_length=8, tasks=tasks, rates="given:1,3")
    assembly = SimpleNamespace(recipe=tiny.t5(phases=(phase,), mixture="given:1,4"))
    losses = iter([5.0, 2.0, 1.0])
    monkeypatch.setattr(evaluate, "Evaluator", lambda *rest: (lambda loss: lambda *state: {"loss": loss})(next(losses)))
    stages = {task.name: SimpleNamespace(task=task, assembly=assembly, index=0) for task in tasks}
    found = evaluate.Evaluators(stages, open_corpora(corpora, {}), 4)(None, None, 0)
    of_each = {"one/loss": 5.0, "all/text/loss": 2.0, "all/pairs/loss": 1.0}
    assert found == pytest.approx(of_each | {"all/loss": 1.2, "loss": 0.25 * 5 + 0.75 * 1.2})


LOSSES = {3: 5.0, 6: 3.0, 9: 4.0, 12: 3.0, 15: math.nan, 18: 3.5, 20: 9.0}


# Orbax leaves coroutines behind where a file does not load
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_best_so_far_survives_a_restart_and_what_is_no_number_is_none(corpus_path, tmp_path, monkeypatch, caplog):
    toys.register(monkeypatch)
    scripted = lambda self, params, frozen, step: {"loss": LOSSES[step]}
    monkeypatch.setattr(evaluate.Evaluators, "__call__", scripted)
    options = {"checkpoint_every": 4, "eval_every": 3, "keep": 1, "keep_best": True}
    go = lambda steps: run(toys.recipe(steps=steps), tiny.options(corpus_path, tmp_path, **options))
    directory = RunDirectory(tmp_path)
    go(9)
    assert directory.checkpoint_steps() == [6, 9]
    go(20)
    assert directory.checkpoint_steps() == [6, 20] and best_steps(directory, "loss") == [6, 20]
    assert "not kept" not in caplog.text
    with pytest.raises(UserError, match="has no evaluation of upper; use one of loss"):
        best_steps(directory, "upper")
    DAMAGES["all files empty"](directory.checkpoints / "6")
    assert restore(directory, best_of="loss").step == 20 and "reading step 20 instead" in caplog.text
    shutil.rmtree(directory.checkpoints / "6")
    assert best_steps(directory, "loss") == [20] and "was at step 6, whose checkpoint was not kept" in caplog.text
    shutil.rmtree(directory.checkpoints / "20")
    with pytest.raises(UserError, match="--best loss: no checkpoint of .* was evaluated"):
        best_steps(directory, "loss")
    directory.metrics.write_text("")
    with pytest.raises(UserError, match="has no evaluation yet; let its run continue"):
        best_steps(directory, "loss")


def test_with_patience_a_run_ends_when_the_best_evaluation_is_so_many_before(corpus_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    seen = []
    scripted = lambda self, params, frozen, step: {"loss": LOSSES[seen.append(step) or step]}
    monkeypatch.setattr(evaluate.Evaluators, "__call__", scripted)
    options = tiny.options(corpus_path, tmp_path, checkpoint_every=4, eval_every=3, patience=2)
    for _ in range(2):  # the second time it has nothing left to do
        assert run(toys.recipe(steps=20), options) == 0
        assert seen == [3, 6, 9, 12] and RunDirectory(tmp_path).checkpoint_steps()[-1] == 12
    assert "--patience 2: stopped" in (tmp_path / "log.txt").read_text()
    with pytest.raises(UserError, match="--patience 2: needs several evaluations, but --eval-every 0 makes only one"):
        tiny.options(corpus_path, tmp_path, patience=2)


def test_losses_of_the_last_phase_alone_are_compared():
    tasks = (Task("a", SequenceToSequence()), Task("b", SequenceToSequence()))
    first, second = (PhaseWithTargets(0.5, 32, 8, target_length=tiny.TARGET, tasks=of) for of in (tasks, tasks[1:]))
    two = tiny.t5(phases=(first, second), steps=20)
    found = {5: {"loss": 1.0, "a/loss": 3.0, "b/loss": 1.0}, 10: {"loss": 2.0, "a/loss": 2.0, "b/loss": 1.5}}
    found |= {15: {"loss": 7.0, "b/loss": 7.0}, 20: {"loss": 8.0, "b/loss": 7.0}}
    assert bests(two, found, [5, 10, 15, 20]) == {"loss": 15, "a": 10, "b": 15}
    assert bests(two, found, [20, 5, 7]) == {"loss": 20, "a": 5, "b": 20}


def test_where_an_evaluation_has_scores_the_highest_is_best():
    recipe = tiny.t5(phases=(PhaseWithTargets(1.0, 32, 8, target_length=tiny.TARGET),))
    found = {5: {"loss": 1.0, "score": 0.2}, 10: {"loss": 2.0, "score": 0.7}, 15: {"loss": 3.0, "score": 0.5}}
    assert best(recipe, {step: losses(recipe, of) for step, of in found.items()}, found) == {"loss": 10}


OF_COMMANDS = {
    "eval": [],
    "generate": ["--prompt", "x"],
    "export": ["--to", "hf"],
    "prompts": ["--examples", "x.jsonl", "--out", "x.json"],
    "discriminator": ["--examples", "x.jsonl", "--out", "x"],
}


@pytest.mark.parametrize("command", OF_COMMANDS)
def test_commands_read_the_best_checkpoint_of_what_they_are_told(command, tmp_path, monkeypatch):
    def reading(source, step=None, mesh=None, best_of=None, ema=False):
        raise UserError(f"{source} {step} {best_of} {ema}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opened, "open_model", reading)
    monkeypatch.setattr(opened, "identity_of", str)
    lines = [{"input": "a", "target": "b", "text": f"c {number}", "label": "AB"[number % 2]} for number in range(9)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for more in ([], ["--ema"]):
        given = ["run", *OF_COMMANDS[command], "--best", "upper", *more]
        with pytest.raises(UserError, match=f"^run None upper {bool(more)}"):
            importlib.import_module(f"pretrain.commands.{command}").main(given)


def test_what_says_two_checkpoints_or_none_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--keep-best: needs several evaluations, but --eval-every 0 makes only one"):
        tiny.options(tmp_path, tmp_path, keep_best=True)
    (tmp_path / "recipe.json").write_text(to_json(recipe(12)))
    with pytest.raises(UserError, match="--best upper: cannot be combined with --step 3"):
        open_model(tmp_path, 3, best_of="upper")
