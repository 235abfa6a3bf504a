"""Toys go through the real loop without an edit there: a carry, two denominators, a frozen part, no layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines.errors import UserError
from models.core.noise import row_keys
from models.core.program import Program
from pretrain.objectives.objective import Moment, Term
from pretrain.recipe import Phase
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import loop
from pretrain.training.assembly import assemble, initial_carry, initial_params
from pretrain.training.opened import restore
from pretrain.training.run import run
from pretrain.training.step import given_in, initial_state, train_step
from tests.pretrain import tiny, toys

pytestmark = pytest.mark.usefixtures("registered")


def test_microbatches_cut_a_carry_with_rows_join_it_again_and_pass_on_one_without():
    recipe, rng = toys.recipe(objective=toys.NextWord(feedback=1.0)), np.random.default_rng(0)
    assembly = assemble(recipe, Program())
    params = jax.jit(lambda: initial_params(assembly))()
    _, axes = initial_carry(assembly, 0)
    tokens = rng.integers(5, 195, (8, 16)).astype(np.int32)
    tokens[::4] %= 100  # one microbatch in four without the rare term
    carry = {"memory": jnp.asarray(rng.standard_normal((8, 8)), jnp.float32), "seen": jnp.asarray([3.0, 8.0])}

    def first_step(microbatches):
        state, frozen = initial_state(assembly, params, 0)
        step = jax.jit(train_step(assembly, axes, microbatches))
        return step(state._replace(carry=carry), frozen, {"tokens": tokens}, given_in(recipe, 0))

    state, metrics = first_step(4)
    keys, sums, seen = row_keys(0, 0, jnp.arange(8)), {"next": Term(0.0, 0.0), "rare": Term(0.0)}, carry["seen"]
    loss = jax.jit(lambda *given: recipe.objective.loss(assembly.model, params, *given[:2], Moment(given[2], True))[:2])
    for rows in (slice(part, None, 4) for part in range(4)):
        own = {"memory": carry["memory"][:, rows], "seen": seen}
        added, after = loss({"tokens": tokens[rows]}, own, keys[rows])
        sums, seen = jax.tree.map(jnp.add, sums, added), after["seen"]
        np.testing.assert_allclose(state.carry["memory"][:, rows], after["memory"], rtol=1e-5)
    expected = sums["next"].sum / 8 + 0.5 * sums["rare"].sum / (tokens > 100).sum()
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-5)
    np.testing.assert_allclose(state.carry["seen"], seen, rtol=1e-5)
    assert abs(float(first_step(1)[1].loss / metrics.loss) - 1) > 1e-4  # the feedback is felt


def test_a_carry_begins_anew_where_a_phase_changes_its_shape(corpus_path, tmp_path):
    one = toys.recipe().phases[0]
    phases = (dataclasses.replace(one, share=0.5), dataclasses.replace(one, share=0.5, batch_size=16))
    run(toys.recipe(steps=20, phases=phases), tiny.options(corpus_path, tmp_path / "run"))
    assert tiny.final_state(tmp_path / "run", 10).carry["memory"].shape == (8, 8)
    final = tiny.final_state(tmp_path / "run").carry
    assert final["memory"].shape == (8, 16) and final["seen"][1] == 10 * 16


def test_a_frozen_part_stays_as_it_began_and_comes_back_on_resume(corpus_path, tmp_path):
    for steps in (10, 20):
        run(toys.recipe(steps=steps, frozen=("words",)), tiny.options(corpus_path, tmp_path / "run"))
    restored = restore(RunDirectory(tmp_path / "run"))
    assert set(restored.params) == {"out", "bias"} and set(restored.frozen) == {"words"}
    start = initial_params(restored.assembly)
    assert tiny.equal(restored.frozen["words"], start["words"])
    assert not tiny.equal(restored.params["out"], start["out"])


TWO_LENGTHS = (toys.TwoLengths(0.5, 16, 8, target_length=4), toys.TwoLengths(0.5, 16, 8, target_length=12))


def test_a_phase_has_the_lengths_that_its_objective_needs(corpus_path, tmp_path, monkeypatch):
    shapes, place = [], loop.place_rows

    def seen(batch, *rest):
        shapes.append(batch["targets"].shape)
        return place(batch, *rest)

    monkeypatch.setattr(loop, "place_rows", seen)
    recipe = toys.recipe(objective=toys.WhatFollows(), phases=TWO_LENGTHS, steps=20)
    assert run(recipe, tiny.options(corpus_path, tmp_path / "run", eval_examples=20)) == 0
    assert shapes == [(8, 4)] * 10 + [(8, 12)] * 10
    assert RunDirectory(tmp_path / "run").read_recipe().phases == TWO_LENGTHS
    losses = [entry["loss"] for entry in read_metrics(RunDirectory(tmp_path / "run"), "train")]
    assert losses[-1] < losses[0]
    assert read_metrics(RunDirectory(tmp_path / "run"), "eval")[-1]["labelled"] == 20, "rows that fill up have labels"


def test_a_loss_between_rows_trains_knows_its_step_and_gives_figures_of_each_example(corpus_path, tmp_path):
    phases = (toys.TwoLengths(1.0, 16, 8, target_length=8),)
    recipe = toys.recipe(objective=toys.InBatch(), phases=phases, steps=3)
    options = tiny.options(corpus_path, tmp_path / "run", log_every=1, eval_examples=20)
    with pytest.raises(UserError, match="--microbatches 2: InBatch compares all rows of a batch"):
        run(recipe, dataclasses.replace(options, microbatches=2))
    assert run(recipe, options) == 0
    assert [entry["at_step"] for entry in read_metrics(RunDirectory(tmp_path / "run"), "train")] == [0, 1, 2]
    (figures,) = read_metrics(RunDirectory(tmp_path / "run"), "eval")
    assert figures["at_step"] == 3 and figures["ranked"] == 16  # of the two whole batches
    assert 0 < figures["mean_rank"] < 7


def carry_at_the_start(monkeypatch, *arguments):
    """Run up to the first step -> the carry that the state then holds."""
    seen = []

    def stopped(run, state, *_):
        seen.append(jax.device_get(state.carry))
        raise UserError("stopped")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="stopped"):
        patch.setattr(loop, "_train_phase", stopped)
        run(*arguments)
    return seen[0]


def test_more_steps_that_move_a_checkpoint_into_another_phase_of_the_same_shape_begin_its_carry_anew(
    corpus_path, tmp_path, monkeypatch
):
    phases = (Phase(0.5, 16, 8), Phase(0.5, 16, 8))
    arguments = lambda steps: (toys.recipe(steps=steps, phases=phases), tiny.options(corpus_path, tmp_path / "run"))
    run(*arguments(10))
    assert carry_at_the_start(monkeypatch, *arguments(12))["seen"][1] == 5 * 8  # still in the second phase
    assert carry_at_the_start(monkeypatch, *arguments(40))["seen"][1] == 0  # now in the first


def test_a_run_made_longer_and_killed_before_its_next_checkpoint_finds_the_carry_as_it_was_written(
    corpus_path, tmp_path, monkeypatch
):
    phases = (Phase(0.5, 16, 8), Phase(0.5, 16, 4))
    arguments = lambda steps: (toys.recipe(steps=steps, phases=phases), tiny.options(corpus_path, tmp_path / "run"))
    run(*arguments(10))
    for _ in range(2):  # recipe.json has the new number of steps from the first time on
        assert carry_at_the_start(monkeypatch, *arguments(40))["memory"].shape == (8, 8)
    assert RunDirectory(tmp_path / "run").checkpoint_steps() == [5, 10]
