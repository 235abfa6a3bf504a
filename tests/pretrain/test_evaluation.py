"""Held-out figures: a fixed set, the right arithmetic, and what guessing reaches."""

import dataclasses
import os
import weakref
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, roc_auc_score

from data_pipelines.batches import RowExamples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.program import Program
from pretrain.__main__ import main
from pretrain.commands.export import Export, export_model
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Sums, Term
from pretrain.objectives.replaced_token_detection import detection_report, score_histograms
from pretrain.recipe import Phase
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import evaluate, placement
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.evaluate import Evaluator
from pretrain.training.placement import stages
from pretrain.training.run import run
from pretrain.training.step import evaluation_step
from tests.pretrain import tiny, toys
from tests.pretrain.reference import random_batch
from tpu.mesh import choose_mesh

ELECTRA = dataclasses.replace(tiny.ELECTRA, discriminator=tiny.ELECTRA.generator)


def evaluator(recipe, corpus_path, examples=20, microbatches=1):
    stage = stages(assemble(recipe, Program()), choose_mesh(None, jax.devices()), microbatches)[0]
    return Evaluator(stage, Corpus(corpus_path), examples)


def with_program(of_rows, run):
    """The evaluator with another program."""
    of_rows.stage = of_rows.stage._replace(evaluate=of_rows.stage.evaluate._replace(run=run))
    return of_rows


@pytest.fixture(scope="module")
def electra(corpus_path):
    """(parameters, an evaluator, its figures of them)."""
    params = initial_params(assemble(tiny.electra(model=ELECTRA), Program()))
    whole = evaluator(tiny.electra(model=ELECTRA), corpus_path)
    return params, whole, whole(params, {}, 0)


def test_the_same_parameters_get_the_same_figures_whatever_the_seed_of_the_run(corpus_path, electra):
    params, one, figures = electra
    assert one(params, {}, 0) == figures
    assert evaluator(tiny.electra(model=ELECTRA, seed=7, steps=99), corpus_path)(params, {}, 0) == figures
    assert figures["loss"] == pytest.approx(figures["generator_loss"] + 50 * figures["discriminator_loss"], rel=1e-6)


def calls_by_rows(recipe, params, corpus_path):
    """(how often the program is called that evaluates a fourth of a batch, the figures)."""
    of_rows = evaluator(recipe, corpus_path, microbatches=4)
    counted = mock.Mock(side_effect=of_rows.stage.evaluate.run)
    figures = with_program(of_rows, counted)(params, {}, 0)
    return counted.call_count, figures


def test_rows_are_evaluated_some_at_a_time_with_the_samples_of_whole_batches(corpus_path, electra):
    params, _, whole = electra
    calls, figures = calls_by_rows(tiny.electra(model=ELECTRA), params, corpus_path)
    assert calls == 10 and figures == pytest.approx(whole, rel=1e-5)  # none is of filling rows alone


def test_rows_are_evaluated_some_at_a_time_each_with_its_own_memory(corpus_path):
    recipe = tiny.transformer_xl()
    params = initial_params(assemble(recipe, Program()))
    calls, figures = calls_by_rows(recipe, params, corpus_path)
    assert calls == 11 and figures == pytest.approx(evaluator(recipe, corpus_path)(params, {}, 0), rel=1e-5)


@pytest.mark.parametrize(
    "length, batch_size, microbatches, devices, rows",
    [
        (128, 2048, 64, 1, 32),
        (512, 8192, 1, 1, 16),
        (512, 8192, 1, 2048, 2048),
        (65536, 4, 1, 2, 2),
        (512, 36, 1, 1, 12),
    ],
)
def test_an_evaluation_computes_rows_that_divide_the_batch_and_fit(length, batch_size, microbatches, devices, rows):
    phase, mesh = Phase(1.0, length, batch_size), SimpleNamespace(shape={"fsdp": devices})
    assert placement._evaluated_rows(tiny.bert().objective, phase, mesh, microbatches) == rows
    assert placement._evaluated_rows(toys.InBatch(), phase, mesh, microbatches) == batch_size


def test_the_set_is_of_the_held_out_split_and_never_whole_in_memory(corpus_path, monkeypatch):
    asked, arrays, alive = [], [], []
    examples, made = MaskedLanguageModel.examples, evaluate.evaluation_batches

    def kept_track_of(*of):
        for batch in made(*of):
            arrays.append(weakref.ref(batch["tokens"]))
            yield batch

    def step(*_):
        alive.append(sum(array() is not None for array in arrays))
        return evaluated("mlm"), {}, {}

    monkeypatch.setattr(MaskedLanguageModel, "examples", lambda *of: asked.append(of[2]) or examples(*of))
    monkeypatch.setattr(MaskedLanguageModel, "report", lambda *_: {})
    of_rows = evaluator(tiny.bert(), corpus_path, 64)
    monkeypatch.setattr(evaluate, "evaluation_batches", kept_track_of)
    with_program(of_rows, step)({}, {}, 0)
    assert asked == ["heldout"] and len(arrays) == 4 and max(alive) <= 2


def evaluated(term, counts=None):
    """Rows of which one is predicted, with the loss 1."""
    one = np.float32(1)
    return Sums({term: Term(one)}, {term: one}), counts or {}


def toy_evaluator(corpus_path, monkeypatch, objective, examples):
    """On batches of 8 rows, of which each has the loss 1 and the ranks 0 to 7."""
    toys.register(monkeypatch)
    phases = (toys.TwoLengths(1.0, 16, 8, target_length=8),)
    of_toy = evaluator(toys.recipe(objective=objective, phases=phases), corpus_path, examples)
    step = lambda *_: (evaluated("pairs", {"step": 0, "batches": 1}), {"ranks": np.arange(8)}, None)
    return with_program(of_toy, step)


@pytest.mark.parametrize("rowwise, rows", [(True, 20), (False, 16)])
def test_rows_that_fill_up_a_batch_have_no_figures_and_are_compared_with_none(corpus_path, monkeypatch, rowwise, rows):
    monkeypatch.setattr(toys.InBatch, "rowwise", rowwise)
    assert toy_evaluator(corpus_path, monkeypatch, toys.InBatch(), 20)({}, {}, 0)["ranked"] == rows


def test_a_loss_between_rows_needs_a_whole_batch(corpus_path, monkeypatch):
    with pytest.raises(UserError, match="--eval-examples 7: the held-out rows fill no batch of 8, and InBatch"):
        toy_evaluator(corpus_path, monkeypatch, toys.InBatch(), 7)


@pytest.mark.parametrize("rowwise", [True, False])
def test_a_split_without_a_row_of_a_phase_is_said(corpus_path, monkeypatch, rowwise):
    monkeypatch.setattr(toys.InBatch, "rowwise", rowwise)
    monkeypatch.setattr(RowExamples, "fixed", lambda *_: iter([]))
    with pytest.raises(UserError, match="held-out split has no rows for phases.0; prepare it with a larger --heldout"):
        toy_evaluator(corpus_path, monkeypatch, toys.InBatch(), 20)


def test_the_loss_has_the_coefficients_of_the_step_that_training_has_come_to(corpus_path, monkeypatch):
    monkeypatch.setattr(toys.InBatch, "coefficients", lambda self, step: {"pairs": 1.0 + step})
    assert toy_evaluator(corpus_path, monkeypatch, toys.InBatch(), 20)({}, {}, 3)["loss"] == 4


def test_the_unigram_baseline_is_the_train_splits_frequencies_on_the_same_predictions(corpus_path):
    held_out, counts = evaluator(tiny.bert(), corpus_path), Corpus(corpus_path).token_counts() + 1
    nats, hits = [], []
    for batch in held_out.batches():
        for targets, weights in zip(batch["prediction_targets"], batch["prediction_weights"], strict=True):
            for target, weight in zip(targets, weights, strict=True):
                if weight:
                    nats.append(-np.log(counts[target] / counts.sum()))
                    hits.append(target == np.argmax(counts))
    baselines = held_out.baselines()
    assert baselines == pytest.approx({"mlm_loss": np.mean(nats), "mlm_accuracy": np.mean(hits)})
    assert 3 < baselines["mlm_loss"] < np.log(195)


def scored(rate, shift):
    """(labels, logits, weights) of many tokens, some of them padding."""
    rng = np.random.default_rng(0)
    labels = rng.random((40, 500)) < rate
    logits = rng.standard_normal(labels.shape) + shift * labels - 1
    return labels, logits, rng.random(labels.shape) < 0.9


@pytest.mark.parametrize(
    "labels, logits, weights",
    [
        scored(0.1, 1.0),
        ([0, 1, 0, 0, 1, 0], [0.3] * 6, [1] * 6),  # equal scores are worth a coin toss
        ([0, 1, 0, 1], [-99, 99, -50, 16], [1] * 4),  # beyond the histogram
    ],
)
def test_detection_figures_are_those_of_sklearn(labels, logits, weights):
    labels, logits, weights = (np.float32(array) for array in (labels, logits, weights))
    halves = [jax.device_get(score_histograms(logits[h], labels[h], weights[h])) for h in (slice(2), slice(2, None))]
    report = detection_report(jax.tree.map(np.add, *halves))
    true, scores = labels[weights > 0], logits[weights > 0]
    expected = {
        "roc_auc": roc_auc_score(true, scores),
        "average_precision": average_precision_score(true, scores),
        "f1": f1_score(true, scores > 0),
        "always_f1": f1_score(true, np.ones_like(true)),
        "discriminator_accuracy": accuracy_score(true, scores > 0),
        "base_rate": true.mean(),
        "base_rate_entropy": -true.mean() * np.log(true.mean()) - (1 - true.mean()) * np.log(1 - true.mean()),
    }
    assert report == pytest.approx(expected, abs=2e-3 if len(true) > 6 else 1e-5)


def test_each_batch_of_the_set_finds_the_memory_that_the_one_before_left(corpus_path):
    carries = []

    def step(params, frozen, batch, index, first, carry, trained):
        carries.append(carry)
        return evaluated("lm"), {}, f"after {index}"

    with_program(evaluator(tiny.transformer_xl(), corpus_path, 24), step)({}, {}, 0)
    assert not carries[0]["segments"].any() and carries[1:] == ["after 0", "after 1"]


def test_each_batch_of_the_set_has_noise_of_its_own():
    class Keys(MaskedLanguageModel):
        def loss(self, model, params, batch, carry, moment):
            assert not moment.train
            return {}, carry, {"keys": moment.keys}

    step, batch = evaluation_step(Keys(), None, seed=1), random_batch(tiny.BERT, 0)
    numbers = [tuple(map(np.int32, of)) for of in ((0, 0), (1, 0), (0, 8), (0, 0))]  # of the batch, of the first row
    *keys, again = (step({}, {}, batch, *of, {}, np.int32(0))[0][1]["keys"] for of in numbers)
    np.testing.assert_array_equal(keys[0], again)
    assert len(np.unique(np.concatenate(keys), axis=0)) == sum(map(len, keys))


def test_eval_prints_what_the_run_measured_beside_the_baseline(uninterrupted, capsys, corpus_path):
    (measured,) = read_metrics(RunDirectory(uninterrupted), "eval")
    assert main(["eval", str(uninterrupted), "--examples", "16"]) == 0
    out = capsys.readouterr().out
    assert "step 12" in out and "unigram" in out and "step 8" not in out
    assert f"{measured['mlm_loss']:.4f}" in out and f"{measured['next_sentence_accuracy']:.4f}" in out
    assert main(["eval", str(uninterrupted), "--examples", "16", "--all", "--corpus", str(corpus_path)]) == 0
    out = capsys.readouterr().out
    assert all(f"step {step}" in out for step in (4, 8, 12))
    assert f"{measured['mlm_loss']:.4f}" in out
    assert main(["eval", str(uninterrupted), "--stride", "8"]) == 2
    assert "--stride 8: bert does not predict next tokens; leave it out" in capsys.readouterr().err


def test_plot_writes_a_picture_whole_or_not_at_all(uninterrupted, tmp_path, capsys):
    out = tmp_path / "new" / "curves.png"
    assert main(["plot", str(uninterrupted), str(uninterrupted), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and list(out.parent.iterdir()) == [out]
    (tmp_path / "file").touch()
    assert main(["plot", str(uninterrupted), "--out", str(tmp_path / "file" / "x.png")]) == 2
    assert "cannot write there" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


def test_export_writes_a_folder_for_the_step_that_is_asked_for(uninterrupted, tmp_path, capsys):
    assert main(["export", str(uninterrupted), "--to", str(tmp_path / "newest")]) == 0
    assert main(["export", str(uninterrupted), "--to", str(tmp_path / "older"), "--step", "8"]) == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("newest", "older")]
    assert files[0] != files[1] and len(files[0]) == len(files[1])
    assert main(["export", str(uninterrupted), "--to", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert 2 * (tmp_path / "half" / "model.safetensors").stat().st_size < 1.1 * len(files[0])
    assert (tmp_path / "newest" / "config.json").is_file() and (tmp_path / "newest" / "tokenizer.json").is_file()
    assert main(["export", str(uninterrupted), "--to", str(tmp_path / "none"), "--step", "5"]) == 2
    assert "no checkpoint of step 5; give one of [4, 8, 12]" in capsys.readouterr().err


def test_a_run_compiles_nothing_after_its_first_evaluation(corpus_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    compiled, after, evaluate = [], [], Evaluator.__call__

    def listen(event, duration, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about)

    def counted(self, *parameters):
        figures = evaluate(self, *parameters)
        after.append(len(compiled))
        return figures

    monkeypatch.setattr(Evaluator, "__call__", counted)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(toys.recipe(steps=15), tiny.options(corpus_path, tmp_path / "run", eval_every=5))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(after) == 3 and after[0] == after[-1] == len(compiled) > 0


def test_what_a_model_remembers_comes_back_as_it_went_in_so_that_nothing_is_compiled_anew():
    for recipe in (tiny.transformer_xl(), tiny.xlnet()):
        stage = stages(assemble(recipe, Program()), choose_mesh(None, jax.devices()))[0]
        about = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
        _, _, carry = jax.eval_shape(stage.evaluate.run, *stage.evaluate.arguments)
        assert about(carry) == about(stage.evaluate.arguments[-2])
        state, _ = jax.eval_shape(stage.train.run, *stage.train.arguments)
        assert about(state) == about(stage.state)


ON_SIX_DEVICES = """
import sys
import jax
import tpu.mesh
from pretrain.__main__ import main
from pretrain.huggingface import export
from pretrain.training import evaluate

run, exported = sys.argv[1:]
tpu.mesh._fits = lambda *_: False  # as on chips too small for all parameters

def place_and_say(*of, place=evaluate.place_rows):
    print("evaluated on", tpu.mesh.mesh_shape(of[-1]))
    return place(*of)

evaluate.place_rows = place_and_say

def export_and_say(params, *rest, whole=export.export):
    print("exported from", max(len(leaf.sharding.device_set) for leaf in jax.tree.leaves(params)), "device")
    whole(params, *rest)

export.export = export_and_say
main(["eval", run, "--examples", "16"])
main(["export", run, "--to", exported])
"""


@pytest.mark.slow
def test_a_run_is_read_on_several_devices_also_where_they_do_not_divide_its_batches(uninterrupted, tmp_path):
    """Batches of 8 rows, 6 devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=6"
    command = ("-c", ON_SIX_DEVICES, uninterrupted, tmp_path / "six")
    process = tiny.start(program=command, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    said, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    (measured,) = read_metrics(RunDirectory(uninterrupted), "eval")
    assert f"{measured['mlm_loss']:.4f}" in said and "evaluated on fsdp=4" in said
    assert "exported from 1 device" in said  # no chip has to hold all parameters
    export_model(Export(run=uninterrupted, to=tmp_path / "one"))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "six")]
    assert files[0] == files[1]
