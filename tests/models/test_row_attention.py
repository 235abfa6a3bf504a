"""The kernel of whole rows is the plain form in outputs, every gradient and dropout, whatever heads, rows and mask."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import plain
from models.attention.kernels.kernel import Attention
from models.attention.kernels.row_attention import by_rows, fits, obstacles
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


class Case(NamedTuple):
    """n: of the queries, where they see another sequence.   biased: whether scores have a bias by distance."""

    length: int
    heads: int
    head_dim: int
    rate: float
    causal: bool = False
    n: int | None = None
    biased: bool = False
    interpret: object = True
    dtype: jnp.dtype = jnp.float32
    tolerance: float = 2e-6


def both_forms(case: Case):
    """(q, k, v, distances, segments of queries and keys, noise, weights) -> (outputs, gradients of the weighted sum) of
    the plain form in float32, of the kernel."""
    width = case.heads * case.head_dim

    def of(attention, x, queries, keys, noise, weights):
        queries = None if case.n is None else queries
        mask = lambda distances: Mask(keys, queries=queries, distances=distances, causal=case.causal)
        how = {"dropout_rate": case.rate, "noise": noise}
        outputs, pull = jax.vjp(lambda *x: attention(*x[:3], mask(x[3]), **how), *x)
        return outputs, pull(weights.astype(outputs.dtype))

    def dense(q, k, v, mask, **how):
        return plain.attention(*(x.astype(jnp.float32) for x in (q, k, v)), mask, **how)

    def kernel(q, k, v, mask, **how):
        flat = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]
        groups = [flat] if case.n is None else [flat[:1], flat[1:]]
        products = [interleaved(*group) for group in groups]
        biases = [jnp.arange(float(x.shape[-1])) % 4 / 2 for x in products]  # exact in bfloat16
        products = [(x.astype(jnp.float32) - bias).astype(x.dtype) for x, bias in zip(products, biases, strict=True)]
        how |= {"head_dim": case.head_dim, "interpret": case.interpret}
        mixed, _ = by_rows(tuple(products), tuple(biases), mask, **how)
        return mixed[..., :width].reshape(q.shape)

    return jax.jit(lambda *inputs: (of(dense, *inputs), of(kernel, *inputs)), compiler_options=QUICK)


CASES = {
    "heads of 64": Case(256, 4, 64, 0.2),
    "heads of 64, causal, one fills lanes up": Case(384, 3, 64, 0.1, causal=True),
    "heads of 32": Case(128, 4, 32, 0.3),
    "heads of 128, causal, without dropout": Case(256, 1, 128, 0.0, causal=True),
    "bfloat16": Case(128, 2, 64, 0.2, dtype=jnp.bfloat16, tolerance=0.03),
    "no memory that nobody wrote or outside of blocks, no race": Case(256, 2, 64, 0.2, True, interpret=STRICT),
    "a bias, and heads that fill lanes up": Case(256, 3, 64, 0.2, biased=True),
    "a bias of a row that is no whole block, causal": Case(114, 2, 64, 0.2, True, biased=True, interpret=STRICT),
    "a bias as large as what is mixed": Case(128, 2, 64, 0.0, biased=True),
    "another sequence, of which some see nothing": Case(256, 2, 64, 0.2, n=114),
    "another sequence and a bias, no whole blocks": Case(129, 1, 128, 0.0, n=200, biased=True),
}


MORE = "heads of 64", "a bias, and heads that fill lanes up", "a bias as large as what is mixed"
CHOSEN = [pytest.param(name, marks=pytest.mark.slow if name in MORE else ()) for name in CASES]


@pytest.mark.parametrize("name", CHOSEN)
def test_outputs_gradients_and_noise_are_those_of_the_plain_form(name, capfd):
    """In rows of documents in turn, of which the first has padding behind them."""
    case = CASES[name]
    rng, low = np.random.default_rng(0), lambda x: np.asarray(x, np.float32)
    n = case.n or case.length
    draw = lambda length: jnp.asarray(rng.normal(size=(BATCH, length, case.heads, case.head_dim)), case.dtype)
    q, k, v, weights = (draw(length) for length in (n, case.length, case.length, n))
    distances = rng.normal(size=(case.heads, n + case.length - 1)).astype(np.float32) if case.biased else None
    queries, keys = (
        np.sort(rng.integers(1, 4, (BATCH, length)), axis=1).astype(np.int32) for length in (n, case.length)
    )
    if case.n:
        queries[1, 5:9] = 7  # see nothing
    for segments in (queries, keys):
        segments[0, rng.integers(1, segments.shape[1]) :] = 0
    real = (keys if case.n is None else queries) > 0
    weights = jnp.where(real[..., None, None], weights, 0)  # of padding nothing is read
    inputs = (q, k, v, distances), queries, keys, row_keys(0, 1, jnp.arange(BATCH)), weights
    (expected, slopes), (mixed, gradients) = both_forms(case)(*inputs)
    assert mixed.dtype == case.dtype and np.isfinite(low(mixed)).all()
    np.testing.assert_allclose(low(mixed)[real], low(expected)[real], atol=case.tolerance)
    for of, gradient, slope in zip("qkvd", gradients, slopes, strict=True):
        if slope is not None:
            np.testing.assert_allclose(low(gradient), low(slope), atol=10 * case.tolerance, err_msg=of)
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
    assert obstacles(Attention(192, 128, 2, 0.0)) == ["length=192: choose a multiple of 128"]


def test_a_decoders_rows_and_a_second_sequence_fit_whatever_their_lengths_and_a_bias_by_distance():
    splash, target = KERNELS["splash"], Attention(114, 128, 2, 0.1, whole=True)
    assert fits(target) and fits(target._replace(context=512)) and fits(target._replace(by_distance=True))
    for wrong, said in (
        (target._replace(length=1025), ["target-length=1025: choose at most 1024"]),
        (target._replace(context=1152), ["context=1152: choose at most 1024"]),
    ):
        assert obstacles(wrong) == said and not fits(wrong)
    biased = Attention(1152, 128, 2, 0.0, biased=True, by_distance=True)
    assert splash.obstacles(biased) == ["length=1152: choose at most 1024"]
    assert splash.obstacles(biased._replace(length=512)) == []
    assert splash.obstacles(Attention(512, 128, 2, 0.0, biased=True)) == ["scores have a bias, which it does not add"]
    assert KERNELS["cudnn"].obstacles(biased) == ["scores have a bias, which it does not add"]


@pytest.mark.parametrize(
    "generation, case, forward, backward",
    [  # bundles of a turn, as XLA:TPU scheduled them
        ("v5p", Case(512, 4, 64, 0.1), 3839, 5147),
        ("v5p", Case(512, 4, 64, 0.0), 2432, 4300),
        ("v5p", Case(512, 2, 128, 0.1), 2463, 3864),
        ("v5p", Case(128, 4, 64, 0.1), 593, 879),
        ("v5p", Case(1024, 4, 64, 0.1, causal=True), 9514, 11187),
        ("v4", Case(512, 4, 64, 0.1), 19449, 20972),
        ("v4", Case(1024, 4, 64, 0.1, causal=True), 43457, 46760),
        ("v6e", Case(512, 4, 64, 0.1), 3194, 4405),
        ("v7x", Case(512, 4, 64, 0.1), 3181, 4344),
        ("v5p", Case(512, 4, 64, 0.1, biased=True), 3751, 5984),
        ("v4", Case(512, 4, 64, 0.1, biased=True), 19816, 22610),
        ("v6e", Case(512, 4, 64, 0.1, biased=True), 3217, 4841),
        ("v5p", Case(114, 4, 64, 0.1, causal=True, biased=True), 578, 1010),
        ("v5p", Case(512, 4, 64, 0.1, n=114), 1525, 1948),
        ("v6e", Case(512, 4, 64, 0.1, n=114), 1166, 1513),
    ],
)
def test_the_cycles_that_it_declares_are_the_bundles_that_were_counted(generation, case, forward, backward):
    batch, n, width = 3, case.n or case.length, case.heads * case.head_dim
    parts = [(case.length, 3)] if case.n is None else [(n, 1), (case.length, 2)]
    products = tuple(jnp.zeros((batch, size, times * width), jnp.bfloat16) for size, times in parts)
    biases = tuple(jnp.zeros(times * width) for _, times in parts)
    distances = jnp.zeros((case.heads, n + case.length - 1)) if case.biased else None
    ones = lambda size: jnp.ones((batch, size), jnp.int32)
    how = {"head_dim": case.head_dim, "dropout_rate": case.rate, "noise": jnp.zeros((batch, 2), jnp.uint32)}

    def loss(products, biases, distances):
        queries = None if case.n is None else ones(n)
        mask = Mask(ones(case.length), queries=queries, distances=distances, causal=case.causal)
        return by_rows(products, biases, mask, **how)[0].astype(jnp.float32).sum()

    expected, close = (
        {"row_attention_forward": forward, "row_attention_backward": backward},
        0.1 if case.biased else 0.15,
    )
    for name, call, times in flops(jax.make_jaxpr(jax.grad(loss))(products, biases, distances), COSTS).calls:
        assert (call.turns, times) == (batch * 2, 1)
        assert COSTS[name].cycles(generation, call) / call.turns == pytest.approx(expected.pop(name), rel=close)
    assert expected == {}
