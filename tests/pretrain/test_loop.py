"""The loop feeds the run's own data and says how fast it goes."""

import contextlib
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.program import Program
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.storage.checkpoints import Checkpoints
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import loop, placement
from pretrain.training.assembly import assemble
from pretrain.training.data import phase_batches
from pretrain.training.placement import of_phase
from pretrain.training.run import run
from pretrain.training.signals import EXIT_STOPPED
from pretrain.training.step import model_flops
from tests.pretrain import tiny, toys
from tpu.mesh import row_mesh


def test_training_batches_are_of_the_train_split_and_the_run_s_seed(corpus_path, tmp_path):
    corpus, recipe = Corpus(corpus_path), tiny.bert(seed=7)
    (batches,) = phase_batches(recipe, {"": corpus}, 0, tmp_path / "examples.json", print).values()
    batch = batches.batch(3, np.arange(8))
    expected = MaskedLanguageModel().examples(corpus, "train", recipe.phases[0], 7).batch(3, np.arange(8))
    assert batch.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(batch[name], array)


def test_model_flops_are_three_forward_passes_and_mfu_is_their_share_of_all_chips_peaks(monkeypatch):
    chip = SimpleNamespace(device_kind="chip")
    monkeypatch.setattr(loop, "peak_flops", {"chip": 1e9}.get)
    mesh = SimpleNamespace(size=4, devices=np.array([chip] * 4))
    recipe, one = tiny.bert(), row_mesh(jax.local_devices()[:1], [1])
    stages = of_phase(placement.stages(assemble(recipe, Program()), one), 0)
    figures = loop.Meter(SimpleNamespace(recipe=recipe, mesh=mesh), stages, None)._speed(2.0, ["", ""], step=5)
    assert figures["mfu"] == pytest.approx(model_flops(recipe, recipe.phases[0]) / 2.0 / 4e9)
    assert figures["tokens_per_s"] == 8 * 32 / 2.0 and figures["step_ms"] == 2000 and figures["seconds_left"] == 30


def test_a_step_s_time_has_no_part_in_evaluations_and_checkpoints_nor_they_in_it(corpus_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    clock = [0]

    def lasts(seconds, function):
        return lambda *given: clock.append(seconds) or function(*given)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: sum(clock)))
    monkeypatch.setattr(loop.Meter, "add", lasts(2, loop.Meter.add))  # each step
    monkeypatch.setattr(loop, "_evaluate", lasts(1000, loop._evaluate))
    monkeypatch.setattr(loop, "_save", lasts(100, loop._save))
    options = tiny.options(corpus_path, tmp_path / "run", eval_every=5, checkpoint_every=3, log_every=10)
    assert run(toys.recipe(steps=20), options) == 0
    reported = read_metrics(RunDirectory(tmp_path / "run"), "train")
    assert [entry.get("step_ms") for entry in reported] == [None, 2000, 2000]


@pytest.mark.parametrize(
    "steps, stopped, traced", [(5, None, []), (6, None, [5]), (20, None, [*range(5, 15)]), (20, 8, [5, 6, 7])]
)
def test_a_trace_is_of_some_steps_and_ends_where_the_run_does(
    corpus_path, tmp_path, monkeypatch, steps, stopped, traced
):
    toys.register(monkeypatch)
    seen, open_now = [], []
    stop = SimpleNamespace(reached=lambda step: step == stopped, signal="SIGTERM")

    @contextlib.contextmanager
    def trace(folder):
        open_now.append(folder)
        yield
        open_now.pop()

    monkeypatch.setattr(jax.profiler, "trace", trace)
    add = loop.Meter.add
    monkeypatch.setattr(loop.Meter, "add", lambda *given: seen.append(bool(open_now)) or add(*given))
    options = tiny.options(corpus_path, tmp_path / "run", profile=True)
    assert run(toys.recipe(steps=steps), options, stop) == (EXIT_STOPPED if stopped else 0)
    assert [step for step, traces in enumerate(seen) if traces] == traced and not open_now


def test_no_memory_for_a_checkpoint_is_said_of_the_checkpoint(corpus_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)

    def save(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(UserError, match="^phase 1: the checkpoint does not fit a device's memory; try a --mesh"):
        run(toys.recipe(steps=10), tiny.options(corpus_path, tmp_path / "run", checkpoint_every=5))


def test_what_loads_batches_ends_where_a_step_fails(corpus_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    ended = []

    def failed(*_):
        raise ZeroDivisionError

    leave = loop.Loader.__exit__
    monkeypatch.setattr(loop.Loader, "__exit__", lambda loader, *error: ended.append(error[0]) or leave(loader, *error))
    monkeypatch.setattr(loop.Meter, "add", failed)
    with pytest.raises(ZeroDivisionError):
        run(toys.recipe(steps=10), tiny.options(corpus_path, tmp_path / "run"))
    assert ended == [ZeroDivisionError]  # not only where all that refers to it is gone


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_no_checkpoint_is_made_of_damaged_text(corpus_path, tmp_path, monkeypatch, split):
    toys.register(monkeypatch)
    corpus = shutil.copytree(corpus_path, tmp_path / "corpus")
    options = tiny.options(corpus, tmp_path / "run", checkpoint_every=5)
    assert run(toys.recipe(steps=10), options) == 0
    tokens = corpus / "parts/000000" / split / "tokens.npy"
    content = bytearray(tokens.read_bytes())
    content[-2] ^= 1  # it stays in the vocabulary
    tokens.write_bytes(content)
    with pytest.raises(UserError, match=f"parts/000000/{split}/tokens.npy has changed"):
        run(toys.recipe(steps=20), options)
    assert RunDirectory(tmp_path / "run").checkpoint_steps()[-1] == 10
