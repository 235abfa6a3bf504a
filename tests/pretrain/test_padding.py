"""The vocabulary's padding rows: a table without them trains alike."""

import functools

import jax
import numpy as np
import pytest

from models.blocks import embeddings, heads
from models.core.noise import row_keys
from models.core.parameters import count, leaves
from models.core.program import Program
from models.families import transformer_xl
from pretrain.objectives.objective import Moment
from pretrain.optimizers import NAMES, Optimizer, transformation
from pretrain.training.assembly import assemble, initial_carry, initial_params
from tests.pretrain import tiny
from tests.pretrain.fields import replaced
from tests.pretrain.reference import random_batch

RECIPES = {
    "bert": tiny.bert(),
    "adaptive": replaced(tiny.transformer_xl(), "model.cutoffs", (10, 20)),
}
QUICK = {"xla_backend_optimization_level": 0}  # to compile


@pytest.fixture
def unpadded(monkeypatch):
    """f -> f's result where tables have no padding rows."""

    def call(function):
        with monkeypatch.context() as patch:
            for module in (embeddings, heads, transformer_xl):
                patch.setattr(module, "padded_vocab", lambda vocab_size: vocab_size)
            jax.clear_caches()  # of parameters that were made with padding
            return function()

    return call


def real_rows(params, like):
    """The leading part of each array, as long as like's; all that is outside must be 0."""

    def cut(array, like):
        part = array[tuple(map(slice, like.shape))]
        assert np.count_nonzero(array) == np.count_nonzero(part)
        return part

    return jax.tree.map(cut, jax.device_get(params), like)


def trained(recipe, params):
    """Parameters after a few large steps with each optimiser."""
    assembly = assemble(recipe, Program(depth="scan"))
    carry, _ = initial_carry(assembly, 0)
    moment = Moment(row_keys(0, 0, np.arange(8)), True)

    def loss(params, batch):
        terms, *_ = recipe.objective.loss(assembly.model, params, batch, carry, moment)
        return sum(term.sum for term in terms.values())

    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)
    found = {}
    for name in NAMES:
        optimizer = transformation(
            Optimizer(name, epsilon=1e-3), assembly.table, recipe.model.vocab_size
        )  # a small one magnifies rounding
        update = jax.jit(optimizer.update, compiler_options=QUICK)
        moved, state = params, optimizer.init(params)
        for number in range(3):
            updates, state = update(gradient(moved, batch_of(recipe, number)), state, moved)
            moved = jax.tree.map(lambda p, u: p - 0.01 * u, moved, updates)
        found[name] = moved
    return found


def batch_of(recipe, number):
    batch = random_batch(recipe.model, number)
    batch |= {"targets": np.roll(batch["tokens"], -1, axis=1), "weights": (batch["segments"] > 0).astype(np.float32)}
    return {name: batch[name] for name in recipe.objective.spec(recipe.phases[0])}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "adaptive"])
def test_with_every_optimizer_padding_rows_stay_zero_and_change_no_other(name, unpadded):
    recipe = replaced(RECIPES[name], "model.vocab_size", 30)
    draw = functools.partial(initial_params, assemble(recipe, Program(depth="scan")))
    params = jax.jit(draw, compiler_options=QUICK)()
    real = real_rows(params, unpadded(lambda: jax.eval_shape(lambda: draw())))
    assert count(real) < count(params)
    expected = unpadded(lambda: trained(recipe, real))
    for optimizer, moved in trained(recipe, params).items():
        for (path, array), (_, other) in zip(leaves(real_rows(moved, real)), leaves(expected[optimizer]), strict=True):
            # The gradient of a key's bias is 0 but for rounding, which Adafactor and Lion make as large as any
            atol = {"adafactor": 1e-4, "lion": 0.1}.get(optimizer, 1e-6) if path.endswith("key/bias") else 1e-6
            np.testing.assert_allclose(array, other, rtol=1e-4, atol=atol, err_msg=f"{optimizer}: {path}")
