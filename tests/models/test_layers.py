"""The shared blocks compute what torch's do."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AbstractMesh, AxisType

from models.blocks.activations import ACTIVATIONS
from models.blocks.dense import Dense
from models.blocks.embeddings import padded_vocab
from models.blocks.feed_forward import FeedForward
from models.blocks.heads import tied_logits
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.positions import gather_positions
from models.blocks.products import contraction, product
from models.blocks.stack import _is_kept
from models.core.noise import row_keys
from models.core.sharding import per_row, placed_by
from tests.models.programs import equations, with_gradients
from tpu.flops import flops
from tpu.mesh import AXES
from tpu.rules import activation_rules

TORCH_ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes_equal_torch(name):
    x = np.linspace(-12, 12, 4001, dtype=np.float32)
    given = torch.tensor(x, requires_grad=True)
    expected = TORCH_ACTIVATIONS[name](given)
    expected.sum().backward()
    ours, (slopes,) = with_gradients(ACTIVATIONS[name], np.ones_like(x))(x)
    np.testing.assert_allclose(ours, expected.detach(), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(slopes, given.grad, atol=2e-5)


@pytest.mark.parametrize(("activation", "function", "times"), [("gelu", "erf", 1), ("gelu_new", "tanh", 1)])
def test_the_value_of_an_activation_is_kept_as_it_is_and_not_computed_again(activation, function, times):
    block = FeedForward(LayerSizes(8, 2, 24, activation, 0.1, 0.1, 1e-12, 0.02), jnp.float32)
    x, keys = np.ones((2, 4, 8), np.float32), row_keys(0, 0, jnp.arange(2))
    params = jax.eval_shape(block.init, jax.random.key(0), x, keys)
    loss = jax.checkpoint(lambda params: block.apply(params, x, keys).sum(), policy=_is_kept)
    program = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert program.count(f"= {function} ") == times
    assert "reduce_precision" in program  # of what the way forward reads, too
    assert "f32[2,4,24] = reduce_precision" not in program


@pytest.mark.parametrize("slices, sequence", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize(
    "module, shape, vectors", [(Norm(1e-12, jnp.float32), (4, 3, 8), 2), (Dense(8, 0.5, jnp.float32), (4, 3, 2, 8), 1)]
)
def test_gradients_that_slices_sum_are_summed_over_positions_first(module, shape, vectors, slices, sequence):
    mesh = AbstractMesh((slices, 2, 1, sequence, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    inputs = [jax.ShapeDtypeStruct(size, jnp.float32) for size in (shape, (4, 8))]
    apart = slices == 2 and sequence == 1
    for x, expected in zip(inputs, (apart, False), strict=True):  # rows that have no positions are summed at once
        loss = lambda params, x: module.apply({"params": params}, x).sum()
        with placed_by(activation_rules(mesh)):
            found = str(jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(module.init, jax.random.key(0), x)["params"], x))
        assert len(re.findall(r"f32\[4,8\] = reduce_sum\[axes=\(1", found)) == vectors * expected
        # A barrier forward, and one that keeps XLA from making both sums one.
        assert found.count(f"f32[4,{'1,' * (x.ndim - 2)}8] = optimization_barrier") == 2 * vectors * expected


@pytest.mark.parametrize(
    "vector, x, copies",
    [
        ((8,), (4, 8), None),
        ((8,), (4, 3, 8), (4, 1, 8)),
        ((3, 8), (4, 3, 8), None),
        ((2, 8), (4, 3, 2, 8), (4, 1, 2, 8)),
        ((2, 1, 8), (4, 2, 3, 8), (4, 2, 1, 8)),  # of heads before positions
    ],
)
def test_a_vector_for_each_row_broadcasts_as_the_vector_does(vector, x, copies):
    mesh = AbstractMesh((2, 2, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    vector, x = jnp.arange(float(math.prod(vector))).reshape(vector), jnp.zeros(x)
    with placed_by(activation_rules(mesh)):
        found = per_row(vector, x)
    assert found.shape == (copies or vector.shape)
    np.testing.assert_array_equal(x + found, x + vector)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_norm_is_torch_layer_norm_also_far_from_zero(offset):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(4, 64)) + offset).astype(np.float32)
    params = {name: rng.normal(size=64).astype(np.float32) for name in ("scale", "bias")}
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x).double(), (64,), eps=1e-12)
    expected = expected.numpy() * params["scale"] + params["bias"]
    np.testing.assert_allclose(
        Norm(1e-12, jnp.float32).apply({"params": params}, x), expected, atol=2e-3 if offset else 1e-5
    )


def test_norm_adds_its_epsilon_to_the_variance():
    x = np.array([[-1.0, 1.0, -1.0, 1.0]], np.float32)
    params = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    np.testing.assert_allclose(Norm(3.0, jnp.float32).apply({"params": params}, x), x / 2, rtol=1e-6)


def test_dense_kernels_start_with_their_deviation_however_wide():
    kernel = Dense(64, 0.02, jnp.float32).init(jax.random.key(0), jnp.zeros((1, 400)))["params"]["kernel"]
    assert kernel.std() == pytest.approx(0.02, rel=0.05)


def test_logits_and_gradients_of_weights_are_sums_in_float32_of_products_of_bfloat16():
    ones, small = jnp.ones((3, 256), jnp.bfloat16), jnp.ones((256, 128)).at[0].set(2.0**-7)
    logits = lambda hidden: tied_logits(hidden, small.T, jnp.zeros(128), 128)
    np.testing.assert_array_equal(logits(ones), 255 + 2.0**-7)  # bfloat16: 255
    traced = equations(jax.make_jaxpr(logits)(ones).jaxpr)
    on_platforms = [e.outvars[0].aval.dtype for e in traced if e.primitive.name == "dot_general"]
    assert on_platforms == [jnp.float32] * 2  # CPUs and others
    g = jnp.ones((256, 128), jnp.bfloat16).at[0].set(2.0**-7)
    for function in (product, functools.partial(contraction, "rw,wo->ro")):
        y, pull = jax.vjp(function, ones[:1].T, jnp.ones((1, 128)))
        np.testing.assert_array_equal(pull(g.astype(y.dtype))[1], [[255 + 2.0**-7] * 128])


def test_gather_positions_multiplies_nothing_on_a_mesh():
    mesh = AbstractMesh((1, 2, 1, 2, 2), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    x, positions, g = jnp.ones((2, 64, 8)), jnp.zeros((2, 16), jnp.int32), jnp.ones((2, 16, 8))
    with placed_by(activation_rules(mesh)):
        traced = jax.make_jaxpr(lambda x: jax.vjp(lambda x: gather_positions(x, positions), x)[1](g))(x)
    assert flops(traced, {}).products == 0  # a product of ones and zeros is quadratic in the length


@pytest.mark.parametrize(("vocab_size", "rows"), [(1, 128), (128, 128), (129, 256), (30522, 30592)])
def test_vocabularies_are_padded_to_a_multiple_of_128(vocab_size, rows):
    assert padded_vocab(vocab_size) == rows


def test_padding_rows_have_no_probability_and_no_gradient():
    rng = np.random.default_rng(0)
    hidden, table = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 8), (128, 8)))
    bias = rng.normal(size=128).astype(np.float32)

    def loss(hidden, table, bias):
        logits = tied_logits(hidden, table, bias, 100)
        return jax.nn.logsumexp(logits, axis=-1).sum(), logits

    gradients, logits = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(hidden, table, bias)
    assert (logits[:, 100:] == -np.inf).all()
    np.testing.assert_allclose(logits[:, :100], (hidden @ table.T + bias)[:, :100], rtol=1e-4, atol=1e-5)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not any(np.asarray(gradient)[100:].any() for gradient in gradients[1:])
