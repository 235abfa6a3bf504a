"""What families to come need of the blocks: a decoder that reads a second sequence, layers of two kinds, more terms."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Stack

from models.attention import sparse
from models.attention.kernels.kernel import Attention, Kernel
from models.attention.kernels.table import KERNELS, choose
from models.attention.mask import Mask, chosen
from models.attention.multi_head import MultiHeadAttention
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.plain import attention
from models.attention.transformer import TransformerLayer
from models.blocks.embeddings import Embeddings, Term
from models.blocks.feed_forward import FeedForward
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.stack import _is_kept, stack
from models.core.noise import site
from models.core.program import Program
from models.families.registry import FAMILIES
from tests.models.programs import equations, interpreted
from tests.models.shapes import parameter_shapes

WIDTH, HEADS, DEPTH, ROWS, LENGTH, KEYS = 16, 2, 2, 3, 10, 7
T5 = LayerSizes(
    WIDTH, HEADS, 24, "gelu_new", 0.0, 0.0, 1e-6, 0.5, head_dim=12, scale=1.0, biases=False, norm="rms", gated=True
)


class CrossLayer(nn.Module):
    """A layer of T5's decoder."""

    def setup(self):
        self.itself, self.other = (MultiHeadAttention(T5, Program(), pre_norm=True) for _ in range(2))
        self.feed_forward = FeedForward(T5, jnp.float32, pre_norm=True)

    def __call__(self, x, shared, noise, state, slots):
        mask, of_context, context = shared
        x = self.other(self.itself(x, mask, site(noise, 0)), of_context, site(noise, 1), context=context)
        return self.feed_forward(x, noise), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x, *shared):
        x, _ = stack(self, [CrossLayer(parent=None)], DEPTH, x, shared, None, Program())
        return Norm(T5.norm_epsilon, jnp.float32, T5.norm, name="norm")(x)


def t5():
    config = T5Config(
        d_model=WIDTH, d_kv=T5.head_dim, d_ff=T5.feed_forward, num_layers=DEPTH, num_heads=HEADS, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", is_decoder=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = T5Stack(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    return model


def test_a_decoder_of_these_blocks_with_a_second_sequence_is_that_of_t5():
    model, rng = t5(), np.random.default_rng(0)
    x, context = (rng.normal(size=(ROWS, n, WIDTH)).astype(np.float32) for n in (LENGTH, KEYS))
    seen = (np.arange(KEYS) < np.array([[7], [4], [1]])).astype(np.int32)
    block = lambda number, part: model.block[number].layer[part]
    stacked = lambda of: np.stack([of(number).weight.detach().numpy().T for number in range(DEPTH)])

    def attended(part, name):
        kernel = lambda letter: {"kernel": stacked(lambda n: getattr(getattr(block(n, part), name), letter))}
        norm = {"scale": stacked(lambda n: block(n, part).layer_norm)}
        return {ours: kernel(ours[0]) for ours in ("query", "key", "value", "output")} | {"norm": norm}

    wi = {"up": "wi_0", "gate": "wi_1", "down": "wo"}
    inner = lambda name: {"kernel": stacked(lambda n: getattr(block(n, 2).DenseReluDense, name))}
    feed_forward = {ours: inner(theirs) for ours, theirs in wi.items()}
    feed_forward["norm"] = {"scale": stacked(lambda n: block(n, 2).layer_norm)}
    layers = {"itself": attended(0, "SelfAttention"), "other": attended(1, "EncDecAttention")}
    params = {"layers": layers | {"feed_forward": feed_forward}}
    params["norm"] = {"scale": model.final_layer_norm.weight.detach().numpy()}
    with torch.no_grad():
        bias = block(0, 0).SelfAttention.compute_bias(LENGTH, LENGTH).numpy()
        given = {"encoder_hidden_states": torch.tensor(context), "encoder_attention_mask": torch.tensor(seen)}
        expected = model(inputs_embeds=torch.tensor(x), **given).last_hidden_state.numpy()
    ones = jnp.ones((ROWS, LENGTH), jnp.int32)
    masks = Mask(ones, causal=True, bias=jnp.asarray(bias)), Mask(jnp.asarray(seen), queries=ones)
    found = Decoder().apply({"params": params}, x, *masks, context)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    shapes = jax.eval_shape(Decoder().init, jax.random.key(0), x, *masks, context)["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)


def test_a_bias_is_that_of_chosen_queries():
    rng, slots = np.random.default_rng(0), jnp.array([[9, 0], [3, 3], [5, 8]])
    q, k, v = (rng.normal(size=(ROWS, LENGTH, HEADS, 4)).astype(np.float32) for _ in range(3))
    bias = jnp.asarray(rng.normal(size=(ROWS, HEADS, LENGTH, LENGTH)), jnp.float32)
    mask = Mask(jnp.ones((ROWS, LENGTH), jnp.int32), bias=bias)
    at = lambda array: np.take_along_axis(array, np.asarray(slots)[..., None, None], 1)
    attend = lambda q, mask: attention(q, k, v, mask, dropout_rate=0.0, noise=None)
    np.testing.assert_allclose(attend(at(q), chosen(mask, slots)), at(attend(q, mask)), rtol=1e-5, atol=1e-6)


SMALL = LayerSizes(WIDTH, HEADS, 24, "gelu", 0.0, 0.0, 1e-6, 0.5)
LARGE = SMALL._replace(width=128, init_std=0.1)  # heads that fill a kernel's lanes


def made(sizes, attention, mask, length, **given):
    """What a layer's attention gives for rows of ones."""
    layer, x = MultiHeadAttention(sizes, Program(attention=attention)), jnp.ones((1, length, sizes.width))
    return layer.init_with_output(jax.random.key(0), x, mask, None, **given)[0]


def blocks_of_first(pattern, length):
    return jax.tree.map(lambda array: array[0], blocks_of(pattern, 1, 2, length))


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.form == "self"])
def test_no_kernel_leaves_a_bias_out(name):
    blocks = blocks_of_first(Pattern("fixed"), 1024) if KERNELS[name].sparse else None
    mask = Mask(jnp.ones((1, 1024), jnp.int32), bias=jnp.zeros((1, 2, 1024, 1024)), blocks=blocks)
    with pytest.raises(ValueError, match="scores have a bias, which it does not add"):
        made(LARGE, name, mask, 1024)


def test_of_the_kernels_of_a_kind_the_first_that_can_is_taken_or_says_why_none_can(monkeypatch):
    for name, why in {"a": ["a cannot"], "b": ["b cannot"], "c": []}.items():
        monkeypatch.setitem(KERNELS, name, Kernel(name, "self", (), lambda attention, why=why: why, None))
    attention = Attention(128, 128, 2, 0.0)
    assert choose("pattern+a+b", "self", attention) == (None, ["a cannot"])
    assert choose("a+c+b", "self", attention) == (KERNELS["c"], [])
    assert choose("a+c", "relative", attention)[1] == [
        "it does not compute relative attention without a sparse pattern"
    ]
    with pytest.raises(ValueError, match="program.attention='a[+]x': use one of "):
        choose("a+x", "self", attention)


ONES = jnp.ones((1, 16), jnp.int32)
BLOCKS = blocks_of_first(Pattern("longformer", block=4, windows=(4,)), 16)
OTHERS = Mask(ONES, queries=ONES)  # a second sequence's


@pytest.mark.parametrize(
    "mask, attention, given, said",
    [
        (Mask(ONES), "xla", {"context": ONES[..., None]}, "a second sequence needs a mask with queries"),
        (OTHERS, "xla", {"context": ONES[..., None], "slots": ONES}, "takes no slots and no global tokens"),
        (dataclasses.replace(OTHERS, blocks=BLOCKS), "dense", {}, "have no sparse pattern and no causal order"),
        (dataclasses.replace(OTHERS, causal=True), "xla", {}, "have no sparse pattern and no causal order"),
        (Mask(ONES, blocks=BLOCKS, bias=jnp.zeros((1, 2, 16, 16))), "blocked", {}, "blocked does not add a bias"),
        (OTHERS, "splash", {}, "length=16: choose a multiple of 128; context=16: choose a multiple of 128"),
    ],
)
def test_what_no_form_of_attention_computes_is_refused(mask, attention, given, said):
    with pytest.raises(ValueError, match=said):
        made(SMALL, attention, mask, 16, **given)


CHANGES = {"head_dim": 4, "scale": 1.0, "biases": False, "norm": "rms", "gated": True}


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize("family", ["xlnet", "transformer-xl", "bigbird-etc", "longformer"])
def test_attention_that_does_not_read_a_size_refuses_it(family, field, monkeypatch):
    config = dataclasses.replace(FAMILIES[family].sizes["tiny"], vocab_size=8)
    monkeypatch.setattr(type(config), field, CHANGES[field], raising=False)
    with pytest.raises(ValueError, match=f"does not read {field}: leave it out"):
        parameter_shapes.__wrapped__(config)


def test_a_scale_is_that_of_scores_whose_products_have_biases():
    x, mask = np.random.default_rng(0).normal(size=(1, 16, WIDTH)).astype(np.float32), Mask(ONES)
    usual, scaled = (MultiHeadAttention(SMALL._replace(scale=scale), Program()) for scale in (None, 0.7))
    params = jax.tree.map(lambda leaf: leaf + 0.3, usual.init(jax.random.key(0), x, mask, None)["params"])
    grown = dict(params, query=jax.tree.map(lambda leaf: leaf * 0.7 * (WIDTH / HEADS) ** 0.5, params["query"]))
    found = scaled.apply({"params": params}, x, mask, None)
    np.testing.assert_allclose(found, usual.apply({"params": grown}, x, mask, None), atol=1e-5)
    assert not np.allclose(found, usual.apply({"params": params}, x, mask, None), atol=1e-3)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_of_a_gated_block_no_large_product_is_computed_again(activation):
    def products(kept):
        block, x = FeedForward(SMALL._replace(activation=activation, gated=True), jnp.float32), jnp.ones((1, 16, WIDTH))
        params = jax.eval_shape(block.init, jax.random.key(0), x, None)["params"]
        run = lambda params: block.apply({"params": params}, x, None)
        run = jax.checkpoint(run, policy=_is_kept) if kept else run
        loss = lambda params: run(params).sum()
        found = equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
        return sum(e.primitive.name == "dot_general" for e in found)

    assert products(True) == products(False)


class Global(TransformerLayer):
    """One that sees all among those of a pattern."""

    def __call__(self, x, mask, noise, state=None, slots=None):
        return super().__call__(x, mask, noise, None, slots)


class Alternating(nn.Module):
    """Layers that see all between such that see what is near."""

    sizes: LayerSizes
    program: Program
    pattern: Pattern

    @nn.compact
    def __call__(self, x, mask):
        layers = [kind(self.sizes, self.program, parent=None) for kind in (Global, TransformerLayer)]
        blocks = blocks_of(self.pattern, 4, self.sizes.heads, x.shape[1])
        return stack(self, layers, 4, x, mask, None, self.program, states=blocks)[0]


@pytest.mark.parametrize(
    "sizes, length, block, attention, calls",
    [
        (SMALL, 16, 4, "blocked", {"blocked": 2}),
        (LARGE, 384, 64, "pattern+splash", {"block_attention": 2, "row_attention": 2}),
    ],
)
def test_layers_that_see_all_take_turns_with_others_each_by_a_way_of_its_own(
    sizes, length, block, attention, calls, monkeypatch
):
    for name in ("splash", "pattern"):
        monkeypatch.setitem(KERNELS, name, interpreted(KERNELS[name]))
    called, in_blocks = [], sparse.attention
    counted = lambda *given, **rest: called.append("blocked") or in_blocks(*given, **rest)
    monkeypatch.setattr(sparse, "BLOCKED", sparse.BLOCKED._replace(mix=counted))
    pattern = Pattern("longformer", block=block, windows=tuple(block // 4 * n for n in (2, 4, 6, 12)))  # of each layer
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, length, sizes.width)), jnp.float32)
    model = Alternating(sizes, Program(attention=attention, depth="unroll"), pattern)
    mask = Mask(jnp.ones((2, length), jnp.int32))
    params = jax.jit(model.init)(jax.random.key(0), x, mask)["params"]["layers"]
    blocks, layer = blocks_of(pattern, 4, sizes.heads, length), TransformerLayer(sizes, Program(attention="dense"))

    def one_by_one(params):
        y = x
        for number in range(4):
            near = dataclasses.replace(mask, blocks=jax.tree.map(lambda array, n=number: array[n], blocks))
            weights = jax.tree.map(lambda array, n=number: array[n // 2], params[str(number % 2)])
            y, _ = layer.apply({"params": weights}, y, near if number % 2 else mask, None)
        return y

    expected = jax.jit(one_by_one)(params)
    apply = jax.jit(lambda params: model.apply({"params": {"layers": params}}, x, mask))
    called.clear()
    np.testing.assert_allclose(apply(params), expected, rtol=0, atol=2e-5)
    called += [str(e.params["name"]) for e in equations(apply.trace(params).jaxpr) if e.primitive.name == "pallas_call"]
    assert {way: sum(way in call for call in called) for way in calls} == calls and len(called) == 2 * len(calls)


def test_embeddings_are_the_sum_of_their_terms():
    terms = (
        Term("positions", 12, "positions", by_place=True),
        Term("tasks", 3, "tasks"),
        Term("one", 1, "one"),
        Term("x", 40, "x"),
    )
    model, rng = Embeddings(50, WIDTH, terms, None, 0.5), np.random.default_rng(0)
    inputs = {name: rng.integers(0, rows, (ROWS, LENGTH)) for name, rows in (("tokens", 50), ("tasks", 3), ("x", 40))}
    params = model.init(jax.random.key(0), inputs)["params"]
    rows = lambda name: np.asarray(params[name])[inputs[name]]
    sum_of = lambda places: rows("tokens") + rows("tasks") + rows("x") + params["one"] + params["positions"][places]
    np.testing.assert_allclose(model.apply({"params": params}, inputs), sum_of(np.arange(LENGTH)), atol=1e-6)
    restarting = np.concatenate([np.arange(6), np.arange(4)])
    again = inputs | {"positions": np.broadcast_to(restarting, (ROWS, LENGTH))}
    np.testing.assert_allclose(model.apply({"params": params}, again), sum_of(restarting), atol=1e-6)
