"""The train step: what accumulates, what is skipped, what stays frozen, what it reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines.errors import UserError
from models.core.parameters import leaves
from models.core.program import Program
from models.families.bigbird import BigBirdConfig
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Term
from pretrain.optimizers import NAMES, Optimizer
from pretrain.recipe import rate_after
from pretrain.schedules import Schedule
from pretrain.training.assembly import assemble, initial_carry, initial_params, split_frozen
from pretrain.training.placement import place_given, stages
from pretrain.training.step import given_in, initial_state, train_step
from tests.pretrain import tiny, toys
from tests.pretrain.reference import random_batch
from tpu.mesh import row_mesh

SCAN = Program(depth="scan")
ELECTRA = tiny.electra()


@functools.cache
def started(recipe):
    """(assembly, state, frozen parameters) before the first step."""
    assembly = assemble(recipe, SCAN)
    state, frozen = initial_state(assembly, jax.jit(functools.partial(initial_params, assembly))(), 0)
    return assembly, state, frozen


@functools.cache
def compiled(recipe, microbatches=1):
    assembly, _, _ = started(recipe)
    _, carry_axes = initial_carry(assembly, 0)
    step = train_step(assembly, carry_axes, microbatches)
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})


def trained(recipe, batches, microbatches=1, state=None):
    """(state, metrics of the last step)."""
    _, first, frozen = started(recipe)
    state, step = state or first, compiled(recipe, microbatches)
    for batch in batches:
        state, metrics = step(state, frozen, batch, given_in(recipe, 0))
    return state, metrics


def uneven_batch(recipe, seed, rows=32):
    """Rows sorted so that one microbatch of 4 x 8 has far more tokens and predictions than another."""
    batch = random_batch(recipe.model, seed, rows, length=32)
    order = np.argsort((batch["segments"] > 0).sum(axis=1))
    # Microbatch i takes rows i, i + 4, ...
    order = order.reshape(4, 8).T.ravel()
    batch = {name: array[order] for name, array in batch.items()}
    batch["prediction_weights"][0::4, 1:] = 0  # a single prediction in each row of the first
    return batch


def toy_batch(seed, rows=8):
    return {"tokens": np.random.default_rng(seed).integers(5, 195, (rows, 16)).astype(np.int32)}


pytestmark = pytest.mark.usefixtures("registered")


def test_four_microbatches_of_8_equal_a_batch_of_32_with_dropout_on():
    batch = uneven_batch(ELECTRA, seed=0)
    whole, metrics = trained(ELECTRA, [batch])
    parts, parts_metrics = trained(ELECTRA, [batch], microbatches=4)
    np.testing.assert_allclose(parts_metrics.loss, metrics.loss, rtol=1e-6)
    np.testing.assert_allclose(parts_metrics.gradient_norm, metrics.gradient_norm, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), parts_metrics.sums, metrics.sums)
    # The first Adam moment is (1 - b1) x the clipped gradient.
    mu, parts_mu = whole.opt_state[0].mu, parts.opt_state[0].mu
    for (path, expected), (_, found) in zip(leaves(mu), leaves(parts_mu), strict=True):
        if path.endswith("key/bias"):  # zero but for rounding: softmax ignores a shift of all scores
            continue
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected), path


def test_noise_is_of_the_seed_the_step_and_the_row(monkeypatch):
    loss = toys.NextWord.loss

    def showing_keys(self, model, params, batch, carry, moment):
        sums, carry, counts = loss(self, model, params, batch, carry, moment)
        return sums, carry, counts | {"keys": moment.keys}

    monkeypatch.setattr(toys.NextWord, "loss", showing_keys)
    _, state, _ = started(toys.recipe())
    keys = [
        trained(toys.recipe(seed=seed), [toy_batch(0)], state=state._replace(step=jnp.int32(step)))[1].counts["keys"]
        for seed, step in ((11, 0), (11, 1), (12, 0))
    ]
    assert len(np.unique(np.reshape(keys, (-1, 2)), axis=0)) == 3 * 8


def test_different_seeds_start_from_different_parameters():
    one, other = (started(toys.recipe(seed=seed))[1].params["words"] for seed in (1, 2))
    assert not np.allclose(one, other)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_that_is_not_finite_changes_nothing_but_the_counters(value):
    recipe = toys.recipe()
    batches = [toy_batch(seed) for seed in range(3)]
    healthy, _ = trained(recipe, batches[:1])
    state = healthy._replace(params=healthy.params | {"bias": healthy.params["bias"].at[0].set(value)})
    for row in (1, 2):
        after, metrics = trained(recipe, batches[1:2], state=state)
        assert not np.isfinite(metrics.loss)
        assert tiny.equal(after._replace(step=0, skipped=0), state._replace(step=0, skipped=0))
        assert after.step == state.step + 1
        np.testing.assert_array_equal(after.skipped, [row, row])
        state = after
    cured, metrics = trained(recipe, batches[2:], state=state._replace(params=healthy.params))
    np.testing.assert_array_equal(cured.skipped, [2, 0])  # in all, and in a row
    assert not tiny.equal(cured.params, healthy.params) and not tiny.equal(cured.carry, healthy.carry)


def test_an_infinite_gradient_of_a_finite_loss_is_skipped(monkeypatch):
    loss = toys.NextWord.loss

    def exploding(self, model, params, *rest):
        sums, carry, counts = loss(self, model, params, *rest)
        # sqrt has an infinite slope at 0.
        return sums | {"next": Term(sums["next"].sum + jnp.sqrt(0.0 * params["out"].sum()))}, carry, counts

    monkeypatch.setattr(toys.NextWord, "loss", exploding)
    recipe = toys.recipe(seed=1)  # not the step that other tests have compiled
    _, before, _ = started(recipe)
    after, metrics = trained(recipe, [toy_batch(0)])
    assert np.isfinite(metrics.loss) and after.skipped[0] == 1
    assert tiny.equal(after.params, before.params)


def test_a_batch_without_predictions_trains_what_it_can():
    batch = uneven_batch(ELECTRA, seed=0)
    batch["prediction_weights"][:] = 0
    state, metrics = trained(ELECTRA, [batch])
    assert state.skipped[0] == 0 and np.isfinite(metrics.loss) and metrics.sums.terms["generator"].sum == 0


def test_the_pooler_is_not_read_by_the_loss_of_masked_tokens():
    """It is made where a class of the export has it, and stays as it begins."""
    model, objective = BigBirdConfig(**vars(tiny.BERT)), MaskedLanguageModel(next_sentence=False)
    stage_of = lambda recipe: stages(assemble(recipe, SCAN), row_mesh(jax.devices()[:1], [1]))[0]
    assert {*stage_of(tiny.bert(model=model, objective=objective)).untrained()} == {"pooler/bias", "pooler/kernel"}
    assert not {"pooler", "pair"} & stage_of(tiny.bert(objective=objective)).state.params.keys()


def test_frozen_parameters_get_no_update_and_no_moments():
    recipe, batch = toys.recipe(frozen=("words",)), toy_batch(0)
    _, first, frozen = started(recipe)
    assert frozen.keys() == {"words"} and first.params.keys() == {"out", "bias"}
    state, metrics = trained(recipe, [batch])
    assert state.opt_state[0].mu.keys() == state.opt_state[0].nu.keys() == {"out", "bias"}
    assert all((state.params[path] != first.params[path]).any() for path in first.params)
    _, unfrozen = trained(toys.recipe(), [batch])
    np.testing.assert_allclose(metrics.loss, unfrozen.loss, rtol=1e-6)  # the model is the same, only less of it moves
    assert metrics.gradient_norm < unfrozen.gradient_norm


def test_a_name_to_freeze_is_a_whole_name():
    params = {"pool": {"kernel": 1}, "pooler": {"kernel": 2}, "layers": {"pool": 3, "key": {"bias": 4}, "keys": 5}}
    trained, frozen = split_frozen(params, tiny.bert(frozen=("pool", "layers/key")))
    assert frozen == {"pool": {"kernel": 1}, "layers": {"key": {"bias": 4}}}
    assert trained == {"pooler": {"kernel": 2}, "layers": {"pool": 3, "keys": 5}}
    with pytest.raises(UserError, match="frozen: no parameters are below predict; did you mean predictions"):
        stages(assemble(tiny.bert(frozen=("predict",))), row_mesh(jax.devices()[:1], [1]))


def test_the_update_is_the_rate_times_the_direction_of_the_clipped_gradient():
    recipe = toys.recipe(schedule=Schedule("constant", peak=0.5, warmup=0.0), optimizer=Optimizer(decay=0.0, clip=0.01))
    _, state, _ = started(recipe)
    after, metrics = trained(recipe, [toy_batch(0)])
    assert metrics.gradient_norm > 0.01  # reported as it was before clipping
    moments = np.concatenate([np.ravel(leaf) for _, leaf in leaves(after.opt_state[0].mu)])
    assert np.linalg.norm(moments) == pytest.approx(0.1 * 0.01, rel=1e-4)
    changes = [np.abs(b - a).max() for (_, a), (_, b) in zip(leaves(state.params), leaves(after.params), strict=True)]
    assert max(changes) == pytest.approx(0.5, rel=1e-2)  # Adam's first step is the rate, times a sign


def test_metrics_are_the_losses_per_prediction_their_weighted_sum_and_the_rate():
    state, metrics = trained(ELECTRA, [uneven_batch(ELECTRA, seed=0)])
    of, weights = metrics.sums
    generator, discriminator = (float(of[term].sum / weights[term]) for term in ("generator", "discriminator"))
    assert float(metrics.loss) == pytest.approx(generator + 50 * discriminator, rel=1e-5)
    assert generator == pytest.approx(np.log(195), rel=0.05)
    assert discriminator == pytest.approx(np.log(2), rel=0.1)
    assert metrics.learning_rate == pytest.approx(rate_after(ELECTRA, 0))
    assert state.step == 1


@pytest.mark.parametrize("optimizer", NAMES)
def test_what_the_loss_does_not_read_is_neither_decayed_nor_moved(optimizer, monkeypatch):
    loss = toys.NextWord.loss
    without = lambda self, model, params, *rest: loss(self, model, params | {"out": jnp.ones((8, 195))}, *rest)
    monkeypatch.setattr(toys.NextWord, "loss", without)
    recipe = toys.recipe(optimizer=Optimizer(name=optimizer, decay=0.5))
    stage = stages(assemble(recipe, SCAN), row_mesh(jax.devices()[:1], [1]))[0]
    assert stage.untrained() == ("out",)
    state, frozen = initial_state(stage.assembly, initial_params(stage.assembly), 0)
    before = jax.device_get(state.params)
    for seed in range(2):
        state, _ = stage.train.run(state, frozen, toy_batch(seed), place_given(stage))
    assert {path for path, leaf in leaves(before) if np.array_equal(leaf, state.params[path])} == {"out"}
