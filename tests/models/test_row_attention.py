"""The kernel of whole rows is the plain form in outputs, every gradient and dropout, whatever heads, rows and mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import plain
from models.attention.kernels.kernel import Attention
from models.attention.kernels.row_attention import Setting, attend_rows, fits, obstacles, row_attention
from models.attention.kernels.table import KERNELS
from models.attention.layouts import interleaved
from models.attention.mask import Mask
from models.attention.multi_head import MultiHeadAttention
from models.blocks.layer import LayerSizes
from models.core.noise import row_keys
from models.core.program import Program
from tests.models.programs import QUICK, STRICT, interpreted
from tpu.flops import flops
from tpu.kernel_costs import COSTS

BATCH = 2


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


CASES = {  # (length, heads, setting), and another dtype and its tolerance
    "heads of 64": (256, 4, Setting(64, 0.2, interpret=True)),
    "heads of 64, causal, one fills lanes up": (384, 3, Setting(64, 0.1, causal=True, interpret=True)),
    "heads of 32": (128, 4, Setting(32, 0.3, interpret=True)),
    "heads of 128, causal, without dropout": (256, 1, Setting(128, 0.0, causal=True, interpret=True)),
    "bfloat16": (128, 2, Setting(64, 0.2, interpret=True), jnp.bfloat16, 0.03),
    "no memory that nobody wrote or outside of blocks, no race": (256, 2, Setting(64, 0.2, True, interpret=STRICT)),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_noise_are_those_of_the_plain_form(name, capfd):
    """In rows of documents in turn, of which the first has padding behind them."""
    length, heads, setting, dtype, tolerance = (*CASES[name], jnp.float32, 2e-6)[:5]
    rng, low = np.random.default_rng(0), lambda x: np.asarray(x, np.float32)
    q, k, v, weights = jnp.asarray(rng.normal(size=(4, BATCH, length, heads, setting.head_dim)), dtype)
    segments = np.sort(rng.integers(1, 4, (BATCH, length)), axis=1).astype(np.int32)
    segments[0, rng.integers(1, length) :] = 0
    real = segments > 0
    weights = jnp.where(real[..., None, None], weights, 0)  # of padding nothing is read
    inputs = q, k, v, jnp.asarray(segments), row_keys(0, 1, jnp.arange(BATCH)), weights
    (expected, slopes), (mixed, gradients) = both_forms(heads, setting)(*inputs)
    assert mixed.dtype == dtype and np.isfinite(low(mixed)).all()
    np.testing.assert_allclose(low(mixed)[real], low(expected)[real], atol=tolerance)
    for of, gradient, slope in zip("qkv", gradients, slopes, strict=True):
        np.testing.assert_allclose(low(gradient), low(slope), atol=10 * tolerance, err_msg=of)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_a_layer_with_dropout_is_the_plain_layer(monkeypatch):
    """With its projections' biases and the noise of its own site; what fills lanes up changes nothing."""
    monkeypatch.setitem(KERNELS, "splash", interpreted(KERNELS["splash"]))
    rng = np.random.default_rng(0)
    x, segments = rng.normal(size=(BATCH, 128, 192)).astype(np.float32), jnp.ones((BATCH, 128), jnp.int32)
    sizes, noise = LayerSizes(192, 3, 16, "gelu", 0.1, 0.2, 1e-12, 0.5), row_keys(0, 1, jnp.arange(BATCH))
    layers = [MultiHeadAttention(sizes, Program(attention=kind)) for kind in ("xla", "splash")]
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
    assert not fits(Attention(192, 128, 2, 0.0))  # no whole blocks


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
