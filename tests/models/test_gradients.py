"""The hand-written gradients equal what JAX derives from the plain formulas, on both sides of each size limit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.blocks.cpu import FEW_ROWS, turned_weights
from models.blocks.heads import tied_logits
from models.blocks.products import product, row_product
from pretrain.objectives.cross_entropy import cross_entropy

ROWS = (FEW_ROWS - 1, FEW_ROWS)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compare(ours, plain, *arguments, which):
    """Values and gradients, weighted so that no two outputs share a cotangent."""
    weigh = lambda f: lambda *a: jnp.sum(f(*a) * normal(9, *jax.eval_shape(f, *a).shape))
    got = jax.jit(jax.value_and_grad(weigh(ours), which))(*arguments)
    expected = jax.jit(jax.value_and_grad(weigh(plain), which))(*arguments)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-4, atol=1e-3)
    for mine, theirs in zip(got[1], expected[1], strict=True):
        assert np.linalg.norm(mine - theirs) <= 2e-6 * np.linalg.norm(theirs)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 16), (16, 48), (16, 16)])
def test_product(rows, inputs, outputs):
    compare(product, lambda x, w: x @ w, normal(0, rows, inputs), normal(1, inputs, outputs), which=(0, 1))


def test_product_of_turned_weights():
    x, w = normal(0, 3, 2, 48), normal(1, 48, 16)

    def turned(x, w):
        with turned_weights():
            return product(x, w)

    compare(turned, lambda x, w: x @ w, x, w, which=(0, 1))
    multiplied = lambda f: re.search(r"dot_general .*: \((.*)\) ->", jax.jit(f).lower(x, w).as_text())[1]
    assert multiplied(turned) == "tensor<16x48xf32>, tensor<48x6xf32>"
    assert multiplied(product) == "tensor<6x48xf32>, tensor<48x16xf32>"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocab", [256, 200])
def test_tied_logits(rows, vocab):
    table, bias = normal(1, 256, 16), normal(2, 256)
    ours = lambda h, t, b: tied_logits(h, t, b, vocab)[:, :vocab]
    plain = lambda h, t, b: (h @ t.T + b)[:, :vocab]
    compare(ours, plain, normal(0, rows, 16), table, bias, which=(0, 1, 2))


def test_cross_entropy_with_padding_of_the_vocabulary():
    """Logits of -inf carry no gradient; large ones do not overflow."""
    logits, targets = normal(0, 6, 40) * 50, np.array([0, 7, 39, 3, 3, 12], np.int32)
    padded = np.pad(logits, ((0, 0), (0, 8)), constant_values=-np.inf)
    plain = lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x), targets[:, None], -1)[:, 0]
    compare(lambda x: cross_entropy(x, targets)[0], plain, logits, which=(0,))
    gradient = jax.grad(lambda x: cross_entropy(x, targets)[0].sum())(padded)
    np.testing.assert_array_equal(gradient[:, 40:], 0)
    np.testing.assert_array_equal(cross_entropy(np.float32([[1, 3, 2]] * 2), np.array([1, 2]))[1], [1, 0])  # hits
    np.testing.assert_allclose(gradient[:, :40], jax.grad(lambda x: plain(x).sum())(logits), atol=1e-6)


def test_only_cpu_programs_exchange_the_factors():
    """The barrier, which would hinder TPUs and GPUs from fusing, is in the CPU's program alone."""
    x, g = jnp.ones((FEW_ROWS, 48)), jnp.ones((FEW_ROWS, 16))
    lowered = lambda platform: jax.jit(row_product).trace(x, g).lower(lowering_platforms=(platform,)).as_text()
    assert "optimization_barrier" in lowered("cpu")
    assert "optimization_barrier" not in lowered("tpu")
