"""The loop feeds the run's own data and says how fast it goes."""

import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.program import Program
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import loop, placement
from pretrain.training.assembly import assemble
from pretrain.training.data import phase_batches
from pretrain.training.placement import of_phase
from pretrain.training.run import run
from pretrain.training.step import model_flops
from tests.pretrain import tiny, toys
from tpu.mesh import row_mesh


def test_training_batches_are_of_the_train_split_and_the_run_s_seed(corpus_path, tmp_path):
    corpus, recipe = Corpus(corpus_path), tiny.bert(seed=7)
    mesh, options = row_mesh(jax.local_devices()[:1], [1]), SimpleNamespace(workers=0)
    (examples,) = phase_batches(recipe, {"": corpus}, 0, tmp_path / "examples.json", print).values()
    step, batch = next(loop._batches(SimpleNamespace(mesh=mesh, options=options), examples, 3, 4))
    expected = MaskedLanguageModel().examples(corpus, "train", recipe.phases[0], 7).batch(3, np.arange(8))
    assert step == 3 and batch.keys() == expected.keys()
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
