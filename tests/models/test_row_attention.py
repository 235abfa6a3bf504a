"""The kernel of whole rows is the plain form in outputs, every gradient and dropout, whatever heads, rows and mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import plain
from models.attention.kernels.kernel import Attention
from models.attention.kernels.row_attention import (
    COSTS,
    Setting,
    attend_rows,
    fits,
    interleaved,
    obstacles,
    row_attention,
)
from models.attention.kernels.table import KERNELS
from models.attention.mask import Mask, visible
from models.attention.self_attention import SelfAttention
from models.blocks.layer import LayerSizes
from models.core.noise import row_keys
from models.core.program import Program
from tests.models.programs import QUICK, STRICT
from tpu.flops import flops

BATCH = 2


@functools.cache
def both_forms(heads: int, setting: Setting):
    """(q, k, v, segments, noise, weights) -> (outputs, gradients of the weighted sum) of the plain form in float32, of
    the kernel."""

    def of(attention, q, k, v, segments, noise, weights):
        outputs, pull = jax.vjp(lambda *x: attention(*x, segments, noise), q, k, v)
        return outputs, pull(weights.astype(outputs.dtype))

    def dense(q, k, v, segments, noise):
        wide, mask = (x.astype(jnp.float32) for x in (q, k, v)), Mask(segments, causal=setting.causal)
        return plain.attention(*wide, mask, dropout_rate=setting.rate, noise=noise)

    def kernel(q, k, v, segments, noise):
        flat = interleaved(*(x.reshape(*x.shape[:2], -1) for x in (q, k, v)))
        biases = jnp.arange(float(flat.shape[-1])) % 4 / 2  # exact in bfloat16
        products = (flat.astype(jnp.float32) - biases).astype(q.dtype)
        mixed, _ = attend_rows(products, biases, segments, noise, setting)
        return mixed[..., : heads * setting.head_dim].reshape(q.shape)

    return jax.jit(lambda *inputs: (of(dense, *inputs), of(kernel, *inputs)), compiler_options=QUICK)


def random_case(length: int, heads: int, head_dim: int, seed: int, dtype=jnp.float32):
    """Rows of documents in turn, of which the first has padding behind them."""
    rng = np.random.default_rng(seed)
    q, k, v, weights = jnp.asarray(rng.normal(size=(4, BATCH, length, heads, head_dim)), dtype)
    segments = np.sort(rng.integers(1, 4, (BATCH, length)), axis=1).astype(np.int32)
    segments[0, rng.integers(1, length) :] = 0
    weights = jnp.where((segments > 0)[..., None, None], weights, 0)  # of padding nothing is read
    return q, k, v, jnp.asarray(segments), row_keys(seed, 1, jnp.arange(BATCH)), weights


def check(length, heads, setting: Setting, seed: int, dtype=jnp.float32, tolerance=2e-6):
    inputs = random_case(length, heads, setting.head_dim, seed, dtype)
    (expected, slopes), (mixed, gradients) = both_forms(heads, setting)(*inputs)
    real, low = np.asarray(inputs[3] > 0), lambda x: np.asarray(x, np.float32)
    assert mixed.dtype == dtype and np.isfinite(low(mixed)).all()
    np.testing.assert_allclose(low(mixed)[real], low(expected)[real], atol=tolerance)
    for name, gradient, slope in zip("qkv", gradients, slopes, strict=True):
        np.testing.assert_allclose(low(gradient), low(slope), atol=10 * tolerance, err_msg=name)


CASES = {  # (length, heads, head_dim, rate, causal)
    "heads of 64": (256, 4, 64, 0.2, False),
    "heads of 64, causal, one fills lanes up": (384, 3, 64, 0.1, True),
    "heads of 32": (128, 4, 32, 0.3, False),
    "heads of 128, causal, without dropout": (256, 1, 128, 0.0, True),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_noise_are_those_of_the_plain_form(name):
    length, heads, head_dim, rate, causal = CASES[name]
    check(length, heads, Setting(head_dim, rate, causal, interpret=True), 0)


def test_bfloat16_is_near():
    check(128, 2, Setting(64, 0.2, interpret=True), 0, jnp.bfloat16, 0.03)


def test_no_memory_is_read_that_nobody_wrote_or_outside_of_blocks_and_nothing_races(capfd):
    check(256, 2, Setting(64, 0.2, causal=True, interpret=STRICT), 0)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_rows_of_any_kind_are_the_plain_form(seed):
    rng = np.random.default_rng(seed)
    head_dim, rate = int(rng.choice([32, 64, 128])), float(rng.choice([0.0, 0.1, 0.5]))
    length, heads = 128 * int(rng.integers(1, 5)), int(rng.integers(1, 5))
    check(length, heads, Setting(head_dim, rate, bool(rng.integers(2)), interpret=True), seed)


def test_what_a_causal_mask_hides_has_no_gradient():
    setting = Setting(64, 0.2, causal=True, interpret=True)
    q, k, v, segments, noise, weights = random_case(256, 2, 64, 0)
    alone = jnp.zeros_like(weights).at[:, 140].set(1.0)
    _, (_, (_, dk, dv)) = both_forms(2, setting)(q, k, v, segments, noise, alone)
    hidden = ~np.asarray(visible(Mask(segments, causal=True)))[:, 0, 140]
    assert not np.any(np.asarray(dk)[hidden]) and not np.any(np.asarray(dv)[hidden]) and np.any(np.asarray(dv))


def test_a_layer_with_dropout_is_the_plain_layer(monkeypatch):
    """With its projections' biases and the noise of its own site; what fills lanes up changes nothing."""
    interpreted = functools.partial(KERNELS["splash"].attend, interpret=True)
    monkeypatch.setitem(KERNELS, "splash", KERNELS["splash"]._replace(attend=interpreted))
    rng = np.random.default_rng(0)
    x, segments = rng.normal(size=(BATCH, 128, 192)).astype(np.float32), jnp.ones((BATCH, 128), jnp.int32)
    sizes, noise = LayerSizes(192, 3, 16, "gelu", 0.1, 0.2, 1e-12, 0.5), row_keys(0, 1, jnp.arange(BATCH))
    layers = [SelfAttention(sizes, Program(attention=kind)) for kind in ("xla", "splash")]
    shapes = jax.eval_shape(layers[0].init, jax.random.key(0), x, Mask(segments), None)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)

    def loss(params, layer):
        return (layer.apply(params, x, Mask(segments), noise) ** 2)[:, :, :5].sum()

    both = jax.jit(lambda params: [jax.value_and_grad(loss)(params, layer) for layer in layers], compiler_options=QUICK)
    (expected, slopes), (ours, gradients) = both(params)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    near = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(slopes["params"]["output"]["kernel"]).max())
    jax.tree.map(near, gradients, slopes)


@pytest.mark.parametrize(
    "length, width, heads, said",
    [
        (512, 1024, 16, []),
        (128, 128, 2, []),
        (128, 64, 1, []),  # filled up
        (1024, 1600, 25, []),
        (1152, 1024, 16, ["length=1152: choose at most 1024"]),
        (128, 96, 2, ["model.heads=2 in model.width=96 have 48 numbers each: choose 32, 64 or 128"]),
    ],
)
def test_rows_fit_up_to_1024_tokens_with_heads_that_fill_lanes(length, width, heads, said):
    attention = Attention(length, width, heads, dropout=0.1)
    assert obstacles(attention) == said and fits(attention) == (not said)
    expected = [f"{why}, or set model.attention_dropout=0.1 to 0" for why in said]
    assert KERNELS["splash"].obstacles(attention) == expected
    assert KERNELS["splash"].obstacles(attention._replace(dropout=0.0)) == []


def test_a_length_of_no_whole_blocks_does_not_fit():
    assert not fits(Attention(192, 128, 2, 0.0))


@pytest.mark.parametrize(
    "generation, length, head_dim, rate, causal, forward, backward",
    [  # bundles of a turn, as XLA:TPU scheduled them
        ("v5p", 512, 64, 0.1, False, 3839, 5147),
        ("v5p", 512, 64, 0.0, False, 2432, 4300),
        ("v5p", 512, 128, 0.1, False, 2463, 3864),
        ("v5p", 128, 64, 0.1, False, 593, 879),
        ("v5p", 1024, 64, 0.1, True, 9514, 11187),
        ("v4", 512, 64, 0.1, False, 19449, 20972),
        ("v4", 1024, 64, 0.1, True, 43457, 46760),
        ("v6e", 512, 64, 0.1, False, 3194, 4405),
        ("v7x", 512, 64, 0.1, False, 3181, 4344),
    ],
)
def test_the_cycles_that_it_declares_are_the_bundles_that_were_counted(
    generation, length, head_dim, rate, causal, forward, backward
):
    batch, width = 3, 256
    given = (jnp.zeros((batch, length, 3 * width), jnp.bfloat16), jnp.zeros(3 * width))
    rows = jnp.ones((batch, length), jnp.int32), jnp.zeros((batch, 2), jnp.uint32)
    loss = lambda *x: row_attention(*x, *rows, Setting(head_dim, rate, causal))[0].astype(jnp.float32).sum()
    expected = {"row_attention_forward": forward, "row_attention_backward": backward}
    for name, call, times in flops(jax.make_jaxpr(jax.grad(loss))(*given), COSTS).calls:
        assert (call.turns, times) == (batch * 2, 1)
        assert COSTS[name].cycles(generation, call) / call.turns == pytest.approx(expected.pop(name), rel=0.15)
    assert expected == {}
