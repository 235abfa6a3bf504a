"""Attention is torch's scaled dot-product attention within segments, with dropout on its probabilities."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.attention.kernels.splash import splash
from models.attention.mask import Mask
from models.attention.multi_head import MultiHeadAttention
from models.attention.patterns.blocks import Blocks
from models.attention.plain import attention
from models.blocks.layer import LayerSizes
from models.core.noise import row_keys
from models.core.program import Program
from models.families.bert import FAMILY, BertConfig
from tests.models.programs import with_gradients

BATCH, LENGTH, HEADS, HEAD_DIM = 3, 10, 2, 4
# documents of a row; 0 is padding
SEGMENTS = np.array([[1] * 4 + [2] * 6, [1] * 3 + [2] * 3 + [3] * 2 + [0] * 2, [1] + [2] * 8 + [0]], np.int32)


def random_qkv(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(BATCH, LENGTH, HEADS, HEAD_DIM)).astype(np.float32) for _ in range(3))


def attend(q, k, v, segments, rate=0.0, keys=None):
    return attention(q, k, v, Mask(jnp.asarray(segments)), dropout_rate=rate, noise=keys)


def test_outputs_and_gradients_equal_torch():
    q, k, v = random_qkv()
    tensors = [torch.tensor(x.transpose(0, 2, 1, 3), requires_grad=True) for x in (q, k, v)]
    visible = torch.tensor(SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :])
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=visible).transpose(1, 2)
    real = SEGMENTS > 0
    weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32) * real[..., None, None]
    (expected * torch.tensor(weights)).sum().backward()
    ours, gradients = with_gradients(lambda *x: attend(*x, SEGMENTS), weights)(q, k, v)
    np.testing.assert_allclose(ours[real], expected.detach().numpy()[real], atol=1e-6)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.transpose(1, 2).numpy(), atol=2e-6)


def test_large_scores_do_not_overflow():
    q, k, v = random_qkv()
    assert np.isfinite(attend(1e4 * q, 1e4 * k, v, SEGMENTS)).all()


def test_scores_of_bfloat16_are_float32():
    q, k, v = ([[32.0, 1.0, 0.0, 0.0]], [[8.0, 0.0, 0.0, 0.0], [8.0, 0.5, 0.0, 0.0]], [[0.0] * 4, [1.0] * 4])
    q, k, v = (jnp.asarray(x, jnp.bfloat16)[None, :, None] for x in (q, k, v))
    mask = Mask(jnp.ones((1, 2), jnp.int32), queries=jnp.ones((1, 1), jnp.int32))
    mixed = attention(q, k, v, mask, dropout_rate=0.0, noise=None)  # of scores 128 and 128.25, both 128 in bfloat16
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(mixed.astype(np.float32), 1 / (1 + np.exp(-0.25)), atol=0.005)


def test_a_sparse_layer_at_some_positions_has_the_gradients_of_the_whole():
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, 8)).astype(np.float32)
    slots = np.array([[9, 0, 0], [2, 3, 7], [1, 8, 1]], np.int32)  # some twice
    layer = MultiHeadAttention(LayerSizes(8, 2, 16, "gelu", 0.0, 0.0, 1e-12, 0.5), Program())
    blocks = Blocks(np.zeros((1, -(-LENGTH // 4), 0), np.int32), block=4, offsets=(-1, 0))
    mask = jax.tree.map(jnp.asarray, Mask(SEGMENTS, blocks=blocks))
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


@pytest.mark.parametrize("dtype, causal, tolerance", [(jnp.float32, True, 2e-6), (jnp.bfloat16, False, 0.03)])
def test_splash_gives_the_same_outputs_and_gradients(dtype, causal, tolerance):
    rng, length = np.random.default_rng(0), 256
    q, k, v, weights = (jnp.asarray(rng.normal(size=(2, length, 2, 64)), dtype) for _ in range(4))
    segments = np.ones((2, length), np.int32)
    segments[0, 100:180], segments[1, 40:] = 2, 0  # two documents; padding
    real, mask = segments > 0, Mask(jnp.asarray(segments), causal=causal)
    weights = jnp.where(real[..., None, None], weights, 0)
    swap = lambda x: jnp.swapaxes(x, 1, 2)  # heads first
    kernel = lambda *x: swap(splash(*map(swap, x), mask, interpret=True))
    plain = lambda *x: attention(*x, mask, dropout_rate=0.0, noise=None)
    (ours, gradients), (expected, expected_gradients) = (with_gradients(f, weights)(q, k, v) for f in (kernel, plain))
    low = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(low(ours)[real], low(expected)[real], atol=tolerance)
    for one, other in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(low(one), low(other), atol=3 * tolerance)


SMALL = BertConfig(vocab_size=50, positions=192, width=16, depth=1, heads=2, feed_forward=32, attention_dropout=0.0)


def ones_of(length):
    """The inputs of one row."""
    return dict.fromkeys(("tokens", "types", "segments"), jnp.ones((1, length), jnp.int32))


# Two heads of 64 fill a block's lanes.
@pytest.mark.parametrize("width, name", [(16, "splash_mha_fwd"), (128, "row_attention_forward")])
@pytest.mark.parametrize("remat, runs", [("dots", 1), ("full", 2)])
def test_rematerialisation_of_all_but_products_does_not_run_a_kernel_twice(width, name, remat, runs):
    model = FAMILY.module(dataclasses.replace(SMALL, width=width), Program(attention="splash", remat=remat))
    inputs = ones_of(128)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)
    traced = jax.make_jaxpr(jax.grad(lambda params: model.apply(params, inputs, method="encode").sum()))(params)
    assert str(traced).count(f"name={name}") == runs


@pytest.mark.parametrize(
    "kind, dropout, length, said",
    [
        ("splash", 0.1, 128, "set model.attention_dropout=0.1 to 0"),
        ("cudnn", 0.1, 128, "set model.attention_dropout=0.1 to 0"),
        ("splash", 0.0, 192, "attention splash does not work here: length=192: choose a multiple of 128"),
    ],
)
def test_what_a_kernel_cannot_do_is_a_clear_error(kind, dropout, length, said):
    module = FAMILY.module(dataclasses.replace(SMALL, attention_dropout=dropout), Program(attention=kind))
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(module.init, jax.random.key(0), ones_of(length))
