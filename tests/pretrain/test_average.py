"""The mean of a run's last checkpoints is that of what they hold, and an export says whose it is."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data_pipelines.errors import UserError
from models.core.parameters import Parameter, leaves
from pretrain.__main__ import main
from pretrain.commands.eval import Eval, evaluate
from pretrain.lora import Lora, merged
from pretrain.optimizers import Optimizer, mean_weights, transformation, with_weights
from pretrain.recipe import Phase
from pretrain.storage.checkpoints import Checkpoints, verified
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import opened
from pretrain.training.assembly import merge
from pretrain.training.opened import open_mean, open_model, restore
from pretrain.training.run import run
from tests.pretrain import tiny


def mean_of(trees):
    """Parameter path -> the mean, by NumPy in double precision."""
    flat = [dict(leaves(jax.device_get(tree))) for tree in trees]
    return {path: np.mean([one[path] for one in flat], 0, np.float64).astype(np.float32) for path in flat[0]}


def test_an_export_is_the_mean_of_the_last_checkpoints_and_names_them(uninterrupted, tmp_path, capsys):
    to = tmp_path / "hf"
    assert main(["export", str(uninterrupted), "--to", str(to), "--average", "3"]) == 0
    expected = mean_of(tiny.final_state(uninterrupted, step).params for step in (4, 8, 12))
    found = dict(leaves(open_model(to).params))
    assert found.keys() == expected.keys()
    for path, mean in expected.items():
        np.testing.assert_array_equal(found[path], mean, path)
    assert json.loads((to / "export.json").read_text())["steps"] == [4, 8, 12]
    card = (to / "README.md").read_text()
    assert "the mean of checkpoints, of steps 4, 8, 12." in card and "after step 12, of the last checkpoint" in card
    assert open_mean(uninterrupted, 2, step=8).averaged == (4, 8)
    with pytest.raises(UserError, match="--average 2: .* is a Hugging Face folder without checkpoints"):
        open_mean(to, 2)
    assert main(["export", str(uninterrupted), "--to", str(to), "--average", "2", "--best", "loss"]) == 2
    assert "--average 2: cannot be combined with --best loss" in capsys.readouterr().err


def test_without_enough_checkpoints_or_with_a_damaged_one_there_is_no_mean(uninterrupted, tmp_path):
    said = r"--average 4: .* has 3 checkpoints to average \(of steps 4, 8, 12\); give a smaller number, or .* --keep"
    with pytest.raises(UserError, match=said):
        open_mean(uninterrupted, 4)
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    for step in (12, 8):  # the newest is not passed over either
        (run / "checkpoints" / str(step) / "default" / "_METADATA").unlink()
        with pytest.raises(UserError, match=f"checkpoint .*{step}: is damaged .*; restore it from a copy"):
            open_mean(run, 2, step=None if step == 12 else 8)


def test_products_are_merged_before_the_mean(corpus_path, tmp_path):
    tiny.begun(tiny.bert(lora=Lora(rank=2), frozen=("layers",)), tiny.options(corpus_path, tmp_path))
    state = tiny.final_state(tmp_path)
    writer = Checkpoints(RunDirectory(tmp_path).checkpoints)
    for step in (2, 3):
        drawn = jax.tree.map(
            lambda leaf, step=step: leaf + step * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), state.params
        )
        writer.save(jax.tree.map(jnp.asarray, state._replace(step=jnp.int32(step), params=drawn)))
    writer.close()
    held = [restore(RunDirectory(tmp_path), step) for step in (2, 3)]
    expected = mean_of(merged(merge(one.params, one.frozen)) for one in held)
    found = dict(leaves(open_mean(tmp_path, 2).params))
    assert found.keys() == expected.keys() and not any(path.startswith("lora") for path in found)
    for path, mean in expected.items():
        np.testing.assert_array_equal(found[path], mean, path)


KEPT, LAST = 0.6, 0.3


@pytest.fixture(scope="module")
def with_ema(corpus_path, tmp_path_factory):
    """A run of 9 steps with a running mean of its weights, the embeddings frozen from step 3 on, a shorter mean from 6
    on."""
    workdir = tmp_path_factory.mktemp("ema") / "run"
    frozen = Phase(1 / 3, 32, 8, frozen=("embeddings",))
    phases = Phase(1 / 3, 32, 8), frozen, dataclasses.replace(frozen, optimizer=Optimizer(ema=LAST))
    recipe = tiny.bert(steps=9, optimizer=Optimizer(ema=KEPT), phases=phases)
    run(recipe, tiny.options(corpus_path, workdir, log_every=3, checkpoint_every=1, keep=9))
    return workdir


def running_mean(run, first, last, kept):
    """Parameter path -> the mean of the weights after steps first .. last, later ones weighted more."""
    held = [dict(leaves(tiny.final_state(run, step).params)) for step in range(first, last + 1)]
    weights = np.array([kept ** (last - step) for step in range(first, last + 1)])
    weights /= weights.sum()
    return {path: sum(w * np.float64(one[path]) for w, one in zip(weights, held, strict=True)) for path in held[0]}


def test_the_running_mean_weighs_the_weights_of_all_steps_of_a_stage(with_ema):
    for first, step, kept in ((1, 3, KEPT), (4, 6, KEPT), (7, 9, LAST)):  # what is trained changes, then the mean
        found = dict(leaves(open_model(with_ema, step, ema=True).params))
        for path, mean in running_mean(with_ema, first, step, kept).items():
            np.testing.assert_allclose(found[path], mean, atol=1e-6, err_msg=path)
    plain = dict(leaves(open_model(with_ema).params))
    assert not np.array_equal(plain["pooler/kernel"], found["pooler/kernel"])
    np.testing.assert_array_equal(plain["embeddings/tokens"], found["embeddings/tokens"])


def test_commands_read_the_mean_and_the_card_says_so(with_ema, uninterrupted, tmp_path, capsys):
    to = tmp_path / "hf"
    assert main(["export", str(with_ema), "--to", str(to), "--ema"]) == 0
    found = dict(leaves(open_model(to).params))
    expected = dict(leaves(open_model(with_ema, ema=True).params))
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, expected[path], path)
    card = (to / "README.md").read_text()
    assert "Its weights are a running mean (decay 0.3)." in card and "of the last checkpoint, not of the mean" in card
    losses = [evaluate(Eval(with_ema, ema=ema))["loss"] for ema in (False, True)]
    assert losses[0] != losses[1]
    for arguments, said in (
        (
            ("export", uninterrupted, "--to", tmp_path / "other", "--ema"),
            "--ema: .* was trained without optimizer.ema; leave it out",
        ),
        (("generate", to, "--prompt", "a", "--ema"), "--ema: .* is a Hugging Face folder, which has no checkpoints"),
        (("export", with_ema, "--to", to, "--ema", "--average", "2"), "--average 2: cannot be combined with --ema"),
    ):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 2
        assert re.search(said, capsys.readouterr().err)


def test_a_skipped_update_leaves_the_mean_as_it_is():
    optimizer = Optimizer(ema=KEPT)
    params, other = {"a": jnp.ones(3)}, {"a": jnp.full(3, 5.0)}
    state = transformation(optimizer, [Parameter("a", (None,), {})], 8).init(params)
    state = with_weights(optimizer, state, params, jnp.bool_(True))
    state = with_weights(optimizer, state, other, jnp.bool_(False))
    np.testing.assert_allclose(mean_weights(optimizer, state)["a"], np.ones(3), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.99, 0.99999])
def test_the_mean_of_weights_that_stay_is_these_weights(rate):
    optimizer, params = Optimizer(ema=rate), {"a": jnp.ones(3)}
    state = transformation(optimizer, [Parameter("a", (None,), {})], 8).init(params)
    for _ in range(100):
        state = with_weights(optimizer, state, params, jnp.bool_(True))
    np.testing.assert_allclose(mean_weights(optimizer, state)["a"], np.ones(3), rtol=1e-5)


def test_a_mean_of_no_step_is_refused(with_ema, monkeypatch):
    empty = lambda state: state._replace(opt_state=(*state.opt_state[:-1], optax.EmaState(jnp.int32(0), {})))
    monkeypatch.setattr(opened, "verified", lambda *given: empty(verified(*given)))
    with pytest.raises(UserError, match="--ema: no step of its phase is done in the checkpoint of step 9"):
        open_model(with_ema, ema=True)
