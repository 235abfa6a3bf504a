"""One mask says causal, prefix, permutation and packed rows, and everything that attends reads it alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import global_tokens
from models.attention.global_tokens import GlobalWeights
from models.attention.kernels.cudnn import cudnn
from models.attention.kernels.splash import splash
from models.attention.kernels.table import KERNELS, require
from models.attention.mask import Mask, chosen, remembering, visible
from models.attention.plain import attention
from models.attention.self_attention import SelfAttention
from models.blocks.dense import Affine
from models.blocks.layer import LayerSizes
from models.core.program import Program
from tests.models.programs import with_gradients

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
    interpreted = functools.partial(KERNELS["splash"].attend, interpret=True)
    monkeypatch.setitem(KERNELS, "splash", KERNELS["splash"]._replace(attend=interpreted))


def dense(name):
    """bool[batch, queries, keys], pair by pair."""
    return np.array([[[bool(RULES[name](b, i, j)) for j in range(6)] for i in range(6)] for b in range(2)])


@pytest.mark.parametrize("name", MASKS)
def test_a_query_sees_what_the_rule_says(name):
    np.testing.assert_array_equal(visible(MASKS[name])[:, 0], dense(name))


@pytest.mark.parametrize("name", MASKS)
def test_chosen_queries_see_what_they_see_in_the_whole_row(name):
    slots = np.array([[5, 0, 3], [2, 2, 4]])
    expected = np.take_along_axis(dense(name), slots[..., None], axis=1)
    np.testing.assert_array_equal(visible(chosen(MASKS[name], slots))[:, 0], expected)


@pytest.mark.parametrize("name", MASKS)
def test_of_a_memory_a_query_sees_all_of_its_segment(name):
    remembered = np.array([[9, 1], [1, 2]], np.int32)
    mask = remembering(remembered, MASKS[name])
    expected = np.concatenate([mask.own[:, :, None] == remembered[:, None], dense(name)], axis=2)
    np.testing.assert_array_equal(visible(mask)[:, 0], expected)
    slots = np.array([[5, 0], [2, 4]])
    of_chosen = visible(chosen(mask, slots))[:, 0]
    np.testing.assert_array_equal(of_chosen, np.take_along_axis(expected, slots[..., None], axis=1))


def test_static_fields_are_no_arrays():
    """What is compiled may depend on them."""
    arrays, structure = jax.tree.flatten(MASKS["packed, causal"])
    assert len(arrays) == 1 and jax.tree.unflatten(structure, arrays).causal is True


@pytest.mark.parametrize("name", MASKS)
def test_plain_attention_is_that_of_the_dense_mask_and_zeros_where_nothing_is_seen(name):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 2, 4)).astype(np.float32)
    weights = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / 2) * dense(name)[:, None]
    total = weights.sum(-1, keepdims=True)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    ours = attention(q, k, v, MASKS[name], dropout_rate=0.0, noise=None)
    np.testing.assert_allclose(ours, np.einsum("bhqk,bkhd->bqhd", shares, v), atol=1e-6)


def near(attend, plain, *arrays):
    """Outputs and gradients of two functions, both weighted by the last array."""
    *inputs, weights = arrays
    both = (with_gradients(lambda *x, f=f: f(*x) * weights, np.ones_like(weights))(*inputs) for f in (attend, plain))
    (ours, of_ours), (expected, of_expected) = both
    for a, b in zip((ours, *of_ours), (expected, *of_expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def causal_case():
    """q, k, v and weights of two rows of packed documents, one padded, and their mask; in 3 blocks of 128."""
    rng, length = np.random.default_rng(0), 384
    segments = np.ones((2, length), np.int32)
    segments[0, 100:300], segments[0, 300:], segments[1, 200:] = 2, 3, 0
    q, k, v, weights = rng.normal(size=(4, 2, length, 2, 64)).astype(np.float32)
    return (q, k, v, weights * (segments > 0)[..., None, None]), Mask(segments, causal=True)


def test_causal_splash_attention_of_packed_documents_is_the_plain_one():
    arrays, mask = causal_case()
    swap = lambda x: jnp.swapaxes(x, 1, 2)  # heads first
    kernel = lambda *x: swap(splash(*map(swap, x), mask, interpret=True))
    near(kernel, lambda *x: attention(*x, mask, dropout_rate=0.0, noise=None), *arrays)


@pytest.mark.parametrize("name", MASKS)
def test_cudnn_is_given_the_same_mask(name, anywhere):
    arrays = np.random.default_rng(0).normal(size=(4, 2, 6, 2, 4)).astype(np.float32)
    plain = functools.partial(attention, mask=MASKS[name], dropout_rate=0.0, noise=None)
    near(lambda *x: cudnn(*x, MASKS[name]), plain, *arrays)


def layer(x, mask, kind="xla"):
    module = SelfAttention(LayerSizes(128, 2, 8, "gelu", 0.0, 0.0, 1e-12, 0.5), Program(attention=kind))
    return jax.jit(lambda x: module.init_with_output(jax.random.key(0), x, mask, None)[0])(x)


OF_ALL_KEYS = [name for name, kernel in KERNELS.items() if kernel.form == "self" and not kernel.sparse]


@pytest.mark.parametrize("kind", OF_ALL_KEYS)
def test_a_decoder_s_layer_of_packed_documents_is_the_same_through_every_kernel(kind, anywhere):
    _, mask = causal_case()
    x = np.random.default_rng(0).normal(size=(2, 384, 128)).astype(np.float32)
    whole, kernel = layer(x, mask), layer(x, mask, kind)
    np.testing.assert_allclose(kernel, whole, atol=2e-5)
    x[:, 250:] = 0  # changes nothing before it
    np.testing.assert_array_equal(layer(x, mask, kind)[:, :250], kernel[:, :250])


def test_a_prefix_is_read_or_refused(anywhere):
    at = np.broadcast_to(np.arange(128), (2, 128))
    mask = Mask(np.ones((2, 128), np.int32), at, np.maximum(at + 1, 50))
    x = np.random.default_rng(0).normal(size=(2, 128, 128)).astype(np.float32)
    np.testing.assert_allclose(layer(x, mask, "cudnn"), layer(x, mask), atol=2e-5)
    with pytest.raises(ValueError, match="attention splash does not work here: the mask has ranks, .*; or use xla"):
        layer(x, mask, "splash")
    with pytest.raises(ValueError, match="attention relative does not work here: it computes relative attention"):
        layer(x, mask, "relative")


@pytest.mark.parametrize("name", ["packed, causal", "prefix"])
def test_a_layer_at_slots_is_the_whole_layer_there(name):
    layer = SelfAttention(LayerSizes(8, 2, 8, "gelu", 0.0, 0.0, 1e-12, 0.5), Program())
    x, slots = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32), np.array([[4, 1], [0, 5]])
    mask = MASKS[name]
    params = jax.jit(layer.init)(jax.random.key(0), x, mask, None)
    whole, some = jax.jit(lambda params: [layer.apply(params, x, mask, None, at) for at in (None, slots)])(params)
    np.testing.assert_allclose(some, np.take_along_axis(whole, slots[..., None], axis=1), atol=1e-6)


@pytest.mark.parametrize("form", ["plain", "cudnn", "folded", "projected"])
def test_a_query_of_another_row_that_sees_nothing_gives_zeros_and_takes_no_gradient(form, anywhere):
    mask = Mask(jnp.array([[1, 1, 0]]), queries=jnp.array([[1, 2]]))
    queries, x = jnp.ones((1, 2, 2, 4)), jnp.arange(24.0).reshape(1, 3, 8)
    weights = GlobalWeights(*[Affine(jnp.eye(8), jnp.ones(8))] * 3)

    def mixed(queries, x):
        if form in ("folded", "projected"):
            return getattr(global_tokens, form)(queries, x, weights, mask, 0.0, None)
        keys = x.reshape(1, 3, 2, 4)
        return (
            cudnn(queries, keys, keys, mask)
            if form == "cudnn"
            else attention(queries, keys, keys, mask, dropout_rate=0.0, noise=None)
        )

    assert (mixed(queries, x)[:, 1] == 0).all() and (mixed(queries, x)[:, 0] != 0).any()
    of_queries, of_x = jax.grad(lambda *given: mixed(*given)[:, 1].sum(), argnums=(0, 1))(queries, x)
    assert (of_queries == 0).all() and (of_x == 0).all()


def test_attention_that_there_is_not_is_an_error_that_names_what_there_is():
    with pytest.raises(ValueError, match="program.attention='flash': use one of xla, dense, blocked, splash"):
        require("flash", "self", None)
