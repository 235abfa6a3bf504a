"""Attention is torch's scaled dot-product attention within segments, with dropout on its probabilities."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.attention.kernels.splash import splash
from models.attention.kernels.table import KERNELS
from models.attention.mask import Mask
from models.attention.patterns.blocks import Blocks
from models.attention.plain import attention
from models.attention.self_attention import SelfAttention
from models.blocks.layer import LayerSizes
from models.core.noise import row_keys
from models.core.program import Program
from models.families.bert import Bert, BertConfig
from tests.models.programs import QUICK, with_gradients

SMALL = BertConfig(vocab_size=50, positions=128, width=16, depth=2, heads=2, feed_forward=32)
BATCH, LENGTH, HEADS, HEAD_DIM = 3, 10, 2, 4
SEGMENTS = {
    "no padding": np.ones((BATCH, LENGTH), np.int32),
    "ragged": (np.arange(LENGTH) < np.array([[10], [7], [1]])).astype(np.int32),
    "documents": np.array([[1] * 4 + [2] * 6, [1] * 3 + [2] * 3 + [3] * 2 + [0] * 2, [1] + [2] * 8 + [0]], np.int32),
}


def random_qkv(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(BATCH, LENGTH, HEADS, HEAD_DIM)).astype(np.float32) for _ in range(3))


def attend(q, k, v, segments, rate=0.0, keys=None):
    return attention(q, k, v, Mask(jnp.asarray(segments)), dropout_rate=rate, noise=keys)


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_outputs_and_gradients_equal_torch(segments):
    q, k, v = random_qkv()
    tensors = [torch.tensor(x.transpose(0, 2, 1, 3), requires_grad=True) for x in (q, k, v)]
    visible = torch.tensor(segments[:, None, :, None] == segments[:, None, None, :])
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=visible)
    weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32) * (segments > 0)[..., None, None]
    (expected.transpose(1, 2) * torch.tensor(weights)).sum().backward()

    real = segments > 0
    ours = np.asarray(attend(q, k, v, segments))
    np.testing.assert_allclose(ours[real], expected.transpose(1, 2).detach().numpy()[real], atol=1e-6)
    gradients = jax.grad(lambda *x: (attend(*x, segments) * weights).sum(), argnums=(0, 1, 2))(q, k, v)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.transpose(1, 2).numpy(), atol=2e-6)


def test_a_real_token_sees_neither_padding_nor_another_document():
    segments = SEGMENTS["documents"]
    q, k, v = random_qkv()
    before = np.asarray(attend(q, k, v, segments))
    hidden = segments != 1
    k, v = (np.where(hidden[..., None, None], 100.0, x).astype(np.float32) for x in (k, v))
    np.testing.assert_array_equal(np.asarray(attend(q, k, v, segments))[~hidden], before[~hidden])


def test_large_scores_do_not_overflow():
    q, k, v = random_qkv()
    assert np.isfinite(attend(1e4 * q, 1e4 * k, v, SEGMENTS["ragged"])).all()


def test_scores_of_bfloat16_are_float32():
    q, k, v = ([[32.0, 1.0, 0.0, 0.0]], [[8.0, 0.0, 0.0, 0.0], [8.0, 0.5, 0.0, 0.0]], [[0.0] * 4, [1.0] * 4])
    q, k, v = (jnp.asarray(x, jnp.bfloat16)[None, :, None] for x in (q, k, v))
    mask = Mask(jnp.ones((1, 2), jnp.int32), queries=jnp.ones((1, 1), jnp.int32))
    mixed = attention(q, k, v, mask, dropout_rate=0.0, noise=None)  # of scores 128 and 128.25, both 128 in bfloat16
    np.testing.assert_allclose(mixed.astype(np.float32), 1 / (1 + np.exp(-0.25)), atol=0.005)


def test_bfloat16_stays_near_float32():
    q, k, v = random_qkv()
    low = attend(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), SEGMENTS["ragged"])
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(np.float32), attend(q, k, v, SEGMENTS["ragged"]), atol=0.05)


def test_a_layer_asked_for_some_positions_gives_those_of_the_whole():
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, 8)).astype(np.float32)
    slots = np.array([[9, 0, 5], [2, 3, 7], [1, 8, 1]], np.int32)  # of several documents
    layer = SelfAttention(LayerSizes(8, 2, 16, "gelu", 0.0, 0.0, 1e-12, 0.5), Program())
    mask = Mask(SEGMENTS["documents"])
    params = jax.jit(layer.init)(jax.random.key(0), x, mask, None)
    whole, some = jax.jit(lambda params: [layer.apply(params, x, mask, None, at) for at in (None, slots)])(params)
    np.testing.assert_allclose(some, np.take_along_axis(whole, slots[..., None], axis=1), atol=1e-5)


def test_a_sparse_layer_at_some_positions_has_the_gradients_of_the_whole():
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, 8)).astype(np.float32)
    slots = np.array([[9, 0, 0], [2, 3, 7], [1, 8, 1]], np.int32)  # some twice
    layer = SelfAttention(LayerSizes(8, 2, 16, "gelu", 0.0, 0.0, 1e-12, 0.5), Program())
    blocks = Blocks(np.zeros((1, -(-LENGTH // 4), 0), np.int32), block=4, offsets=(-1, 0))
    mask = jax.tree.map(jnp.asarray, Mask(SEGMENTS["documents"], blocks=blocks))
    weights = np.random.default_rng(1).normal(size=(*slots.shape, 8)).astype(np.float32)

    def total(of, params, x):
        some = of(params, x)
        return jnp.sum(some * weights), some

    at_slots = lambda params, x: layer.apply(params, x, mask, None, slots)
    of_whole = lambda params, x: jnp.take_along_axis(layer.apply(params, x, mask, None), slots[..., None], axis=1)
    params = jax.jit(layer.init)(jax.random.key(0), x, mask, None)
    both = [jax.grad(functools.partial(total, of), (0, 1), has_aux=True) for of in (at_slots, of_whole)]
    found, expected = jax.jit(lambda *given: [of(*given) for of in both])(params, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


def test_dropout_falls_on_the_probabilities():
    length = 64
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(BATCH, length, HEADS, length)).astype(np.float32) for _ in range(2))
    # With the identity for values the output is the probabilities themselves.
    v = np.broadcast_to(np.eye(length, dtype=np.float32)[None, :, None, :], q.shape)
    segments, keys = np.ones((BATCH, length), np.int32), row_keys(0, 0, jnp.arange(BATCH))
    whole = np.asarray(attend(q, k, v, segments))
    np.testing.assert_allclose(whole.sum(-1), 1.0, atol=1e-5)
    dropped = np.asarray(attend(q, k, v, segments, rate=0.25, keys=keys))
    kept = dropped != 0
    assert abs(kept.mean() - 0.75) < 5 * (0.75 * 0.25 / kept.size) ** 0.5
    np.testing.assert_allclose(dropped[kept], whole[kept] / 0.75, rtol=1e-5)
    heads = kept.transpose(2, 0, 1, 3).reshape(HEADS, -1)
    assert abs((heads[0] == heads[1]).mean() - (0.75**2 + 0.25**2)) < 0.02  # every head draws its own


def by_splash(q, k, v, segments):
    swap = lambda x: jnp.swapaxes(x, 1, 2)  # heads first
    return swap(splash(*map(swap, (q, k, v)), Mask(segments), interpret=True))


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 0.03)])
def test_splash_gives_the_same_outputs_and_gradients(dtype, tolerance):
    length = 256
    rng = np.random.default_rng(0)
    q, k, v, weights = (jnp.asarray(rng.normal(size=(2, length, 4, 64)), dtype) for _ in range(4))
    segments = np.ones((2, length), np.int32)
    segments[0, 100:180], segments[1, 40:] = 2, 0  # two documents; padding
    weights = jnp.where((segments > 0)[..., None, None], weights, 0)
    kernel = lambda *x: by_splash(*x, jnp.asarray(segments))
    plain = lambda *x: attend(*x, segments)
    (ours, gradients), (expected, expected_gradients) = (with_gradients(f, weights)(q, k, v) for f in (kernel, plain))
    real = segments > 0
    low = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(low(ours)[real], low(expected)[real], atol=tolerance)
    for one, other in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(low(one), low(other), atol=3 * tolerance)


@pytest.mark.parametrize("kind", ["splash", "cudnn"])
def test_kernels_have_no_dropout(kind):
    module = Bert(SMALL, Program(attention=kind))
    with pytest.raises(ValueError, match="set model.attention_dropout=0.1 to 0"):
        jax.eval_shape(module.init, jax.random.key(0), ones_of(128))


def ones_of(length):
    """The inputs of one row."""
    return dict.fromkeys(("tokens", "types", "segments"), jnp.ones((1, length), jnp.int32))


def token_logits(model, params, inputs, slots):
    """At the first positions."""
    at = jnp.broadcast_to(jnp.arange(slots), (len(inputs["tokens"]), slots))
    hidden = model.apply(params, inputs, None, at, method="encode")
    return model.apply(params, hidden, method="token_logits")


WIDE = dataclasses.replace(SMALL, width=128)  # two heads of 64 fill a block's lanes


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["splash", "rows"])
def test_a_model_with_a_kernel_is_the_same_model(monkeypatch, config):
    config = dataclasses.replace(config, attention_dropout=0.0)
    interpreted = KERNELS["splash"]._replace(attend=functools.partial(KERNELS["splash"].attend, interpret=True))
    monkeypatch.setitem(KERNELS, "splash", interpreted)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (2, 128))
    segments = (np.arange(128) < np.array([[128], [90]])).astype(np.int32)
    inputs = {"tokens": tokens, "types": np.zeros_like(tokens), "segments": segments}
    plain, kernel = (Bert(config, Program(attention=kind, remat="dots")) for kind in ("xla", "splash"))
    shapes, same = (jax.eval_shape(model.init, jax.random.key(0), inputs) for model in (plain, kernel))
    assert shapes == same
    draw = lambda path, leaf: rng.normal(path[-1].key == "scale", 0.1, leaf.shape).astype(np.float32)
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    loss = lambda params, model: jax.nn.log_softmax(token_logits(model, params, inputs, 10))[:, 7].sum()
    value_and_gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1, compiler_options=QUICK)
    (one, ours), (other, theirs) = (value_and_gradient(params, model) for model in (kernel, plain))
    np.testing.assert_allclose(one, other, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


@pytest.mark.parametrize("config, name", [(SMALL, "splash_mha_fwd"), (WIDE, "row_attention_forward")])
@pytest.mark.parametrize("remat, runs", [("none", 1), ("dots", 1), ("full", 2)])
def test_rematerialisation_of_all_but_products_does_not_run_a_kernel_twice(config, name, remat, runs):
    config = dataclasses.replace(config, attention_dropout=0.0)
    model, inputs = Bert(config, Program(attention="splash", remat=remat)), ones_of(128)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)
    traced = jax.make_jaxpr(jax.grad(lambda params: token_logits(model, params, inputs, 8).sum()))(params)
    assert str(traced).count(f"name={name}") == runs


def test_a_length_that_the_kernel_cannot_cut_is_a_clear_error():
    config = dataclasses.replace(SMALL, attention_dropout=0.0, positions=192)
    module = Bert(config, Program(attention="splash"))
    with pytest.raises(ValueError, match="attention splash does not work here: length=192: choose a multiple of 128"):
        jax.eval_shape(module.init, jax.random.key(0), ones_of(192))
