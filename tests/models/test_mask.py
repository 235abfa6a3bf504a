"""One mask says causal, prefix, permutation and packed rows, and everything that attends reads it alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import global_tokens
from models.attention.kernels.cudnn import cudnn
from models.attention.kernels.table import KERNELS, require
from models.attention.mask import Mask, chosen, remembering, visible
from models.attention.multi_head import MultiHeadAttention
from models.attention.operands import Projections
from models.attention.plain import attention
from models.attention.transformer import TransformerLayer
from models.blocks.dense import Affine
from models.blocks.layer import LayerSizes
from models.core.program import Program
from tests.models.programs import interpreted, with_gradients

PACKED = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]], np.int32)  # documents; 0 is padding
PLACES = np.broadcast_to(np.arange(6, dtype=np.int32), PACKED.shape)
PREFIX = np.array([[2], [4]], np.int32)  # leading tokens that all see
RANKS = np.array([[3, 0, 4, 1, 5, 2], [0, 5, 1, 4, 2, 3]], np.int32)
MASKS = {
    "packed": Mask(PACKED),
    "packed, causal": Mask(PACKED, causal=True),
    "prefix": Mask(np.ones_like(PACKED), PLACES, np.where(PLACES < PREFIX, PREFIX, PLACES + 1)),
    "permutation": Mask(PACKED, RANKS, RANKS),
    "permutation with themselves": Mask(PACKED, RANKS, RANKS, itself=True),
}
RULES = {  # (row, query i, key j) -> whether i sees j
    "packed": lambda b, i, j: PACKED[b, i] == PACKED[b, j],
    "packed, causal": lambda b, i, j: PACKED[b, i] == PACKED[b, j] and j <= i,
    "prefix": lambda b, i, j: j <= i or (i < PREFIX[b, 0] and j < PREFIX[b, 0]),
    "permutation": lambda b, i, j: PACKED[b, i] == PACKED[b, j] and RANKS[b, j] < RANKS[b, i],
    "permutation with themselves": lambda b, i, j: PACKED[b, i] == PACKED[b, j] and RANKS[b, j] <= RANKS[b, i],
}


@pytest.fixture
def anywhere(monkeypatch):
    """Kernels run as plain operations, JAX's own in cuDNN's place, which takes the same arguments."""
    real = jax.nn.dot_product_attention
    asked = lambda *x, implementation, **given: real(*x, **given, implementation="xla")
    monkeypatch.setattr(jax.nn, "dot_product_attention", asked)
    monkeypatch.setitem(KERNELS, "splash", interpreted(KERNELS["splash"]))


def dense(name):
    """bool[batch, queries, keys], pair by pair."""
    return np.array([[[bool(RULES[name](b, i, j)) for j in range(6)] for i in range(6)] for b in range(2)])


@pytest.mark.parametrize("name", MASKS)
def test_a_query_sees_what_the_rule_says_also_chosen_or_with_a_memory_of_which_it_sees_its_segment(name):
    mask, remembered, slots = MASKS[name], np.array([[9, 1], [1, 2]], np.int32), np.array([[5, 0, 3], [2, 2, 4]])
    with_memory = np.concatenate([mask.query_segments[:, :, None] == remembered[:, None], dense(name)], axis=2)
    for asked, expected in ((mask, dense(name)), (remembering(remembered, mask), with_memory)):
        np.testing.assert_array_equal(visible(asked)[:, 0], expected)
        of_chosen = np.take_along_axis(expected, slots[..., None], axis=1)
        np.testing.assert_array_equal(visible(chosen(asked, slots))[:, 0], of_chosen)


def test_static_fields_are_no_arrays():
    """What is compiled may depend on them."""
    arrays, structure = jax.tree.flatten(MASKS["packed, causal"])
    assert len(arrays) == 1 and jax.tree.unflatten(structure, arrays).causal is True


@pytest.mark.parametrize("name", MASKS)
def test_plain_attention_and_cudnns_are_that_of_the_dense_mask_and_zeros_where_nothing_is_seen(name, anywhere):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 2, 4)).astype(np.float32)
    weights = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / 2) * dense(name)[:, None]
    total = weights.sum(-1, keepdims=True)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    plain = functools.partial(attention, dropout_rate=0.0, noise=None)
    for ours in jax.jit(lambda *x: [attend(*x, MASKS[name]) for attend in (plain, cudnn)])(q, k, v):
        np.testing.assert_allclose(ours, np.einsum("bhqk,bkhd->bqhd", shares, v), atol=1e-6)


@functools.cache
def layer(kind):
    """(x, mask) -> a layer's outputs."""
    module = MultiHeadAttention(LayerSizes(128, 2, 8, "gelu", 0.0, 0.0, 1e-12, 0.5), Program(attention=kind))
    return jax.jit(lambda x, mask: module.init_with_output(jax.random.key(0), x, mask, None)[0])


OF_ALL_KEYS = [name for name, kernel in KERNELS.items() if kernel.form == "self" and not kernel.sparse]


@pytest.mark.parametrize("kind", OF_ALL_KEYS)
def test_a_decoder_s_layer_of_packed_documents_is_the_same_through_every_kernel(kind, anywhere):
    segments = np.ones((2, 384), np.int32)
    segments[0, 100:300], segments[0, 300:], segments[1, 200:] = 2, 3, 0  # packed documents, one padded
    mask, x = Mask(segments, causal=True), np.random.default_rng(0).normal(size=(2, 384, 128)).astype(np.float32)
    kernel = layer(kind)(x, mask)
    np.testing.assert_allclose(kernel, layer("xla")(x, mask), atol=2e-5)
    x[:, 250:] = 0  # changes nothing before it
    np.testing.assert_array_equal(layer(kind)(x, mask)[:, :250], kernel[:, :250])


@pytest.mark.parametrize("kind", OF_ALL_KEYS)
def test_a_second_sequence_is_the_same_through_every_kernel_and_zeros_for_who_sees_none_of_it(kind, anywhere):
    rng = np.random.default_rng(0)
    x, context = (rng.normal(size=(2, n, 128)).astype(np.float32) for n in (256, 384))
    segments, queries = np.ones((2, 384), np.int32), np.ones((2, 256), np.int32)
    segments[0, 200:], queries[0, 100:], segments[1, 300:], queries[1, 50:60] = 2, 2, 0, 3  # no key has 3
    mask = Mask(jnp.asarray(segments), queries=jnp.asarray(queries))

    def attended(attention):
        layer = MultiHeadAttention(LayerSizes(128, 2, 8, "gelu", 0.0, 0.0, 1e-12, 0.5), Program(attention=attention))

        def loss(x, context):
            y = layer.init_with_output(jax.random.key(0), x, mask, None, context=context)[0]
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, context)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4), attended(kind), attended("xla"))


@pytest.mark.parametrize("kind", OF_ALL_KEYS)
def test_values_and_residuals_of_other_arrays_are_the_same_through_every_kernel(kind, anywhere):
    """As in MobileBERT, where they have widths of their own."""
    rng = np.random.default_rng(0)
    x, values, residual = (rng.normal(size=(2, 128, width)).astype(np.float32) for width in (128, 48, 64))
    mask = Mask(jnp.asarray(np.arange(128) < np.array([[128], [90]])).astype(np.int32))

    def attended(attention):
        sizes = LayerSizes(64, 2, 8, "gelu", 0.0, 0.0, 1e-12, 0.5, head_dim=64)
        layer = MultiHeadAttention(sizes, Program(attention=attention))

        def loss(*inputs):
            x, values, residual = inputs
            given = {"values": values, "residual": residual}
            y = layer.init_with_output(jax.random.key(0), x, mask, None, **given)[0]
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, values, residual)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4), attended(kind), attended("xla"))


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
def test_a_layer_at_slots_is_the_whole_row_there(pre_norm):
    layer = TransformerLayer(LayerSizes(8, 2, 16, "gelu", 0.0, 0.0, 1e-5, 0.5), Program(), pre_norm)
    x, slots = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32), np.array([[5, 0, 3], [2, 2, 4]])
    run = lambda at: layer.init_with_output(jax.random.key(0), x, MASKS["packed, causal"], None, None, at)[0][0]
    some, whole = jax.jit(lambda: (run(slots), run(None)))()
    np.testing.assert_allclose(some, np.take_along_axis(whole, slots[..., None], axis=1), atol=1e-5)


def test_a_prefix_is_read_or_refused(anywhere):
    at = np.broadcast_to(np.arange(128), (2, 128))
    mask = Mask(np.ones((2, 128), np.int32), at, np.maximum(at + 1, 50))
    x = np.random.default_rng(0).normal(size=(2, 128, 128)).astype(np.float32)
    np.testing.assert_allclose(layer("cudnn")(x, mask), layer("xla")(x, mask), atol=2e-5)
    with pytest.raises(ValueError, match="attention splash does not work here: the mask has ranks, .*; or use xla"):
        layer("splash")(x, mask)
    with pytest.raises(ValueError, match="attention relative does not work here: it does not compute self attention"):
        layer("relative")(x, mask)


@pytest.mark.parametrize("form", ["plain", "cudnn", "folded", "projected"])
def test_a_query_of_another_row_that_sees_nothing_gives_zeros_and_takes_no_gradient(form, anywhere):
    mask = Mask(jnp.array([[1, 1, 0]]), queries=jnp.array([[1, 2]]))
    queries, x = jnp.ones((1, 2, 2, 4)), jnp.arange(24.0).reshape(1, 3, 8)
    weights = Projections(*[Affine(jnp.eye(8), jnp.ones(8))] * 4)

    def mixed(queries, x):
        keys = x.reshape(1, 3, 2, 4)
        if form == "cudnn":
            return cudnn(queries, keys, keys, mask)
        if form == "plain":
            return attention(queries, keys, keys, mask, dropout_rate=0.0, noise=None)
        return getattr(global_tokens, form)(queries, x, weights, mask, 0.0, None)

    of_second = np.broadcast_to(np.array([0.0, 1.0])[:, None, None], queries.shape)
    outputs, (of_queries, of_x) = with_gradients(mixed, jnp.array(of_second))(queries, x)
    assert (outputs[:, 1] == 0).all() and (outputs[:, 0] != 0).any()
    assert (of_queries == 0).all() and (of_x == 0).all()


def test_attention_that_there_is_not_is_an_error_that_names_what_there_is():
    with pytest.raises(ValueError, match="program.attention='flash': use one of xla, dense, blocked, splash"):
        require("flash", "self", None)
