"""The kernel of relative attention gives the numbers, the gradients and the noise of the plain operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.kernels.kernel import Attention
from models.attention.kernels.relative_kernel import by_kernel
from models.attention.kernels.table import KERNELS, require
from models.attention.mask import Mask, chosen, remembering
from models.attention.operands import Biases, Context
from models.attention.relative import asked, relative_attention
from models.blocks.memory import Memory
from models.blocks.positions import gather_positions
from models.core.noise import row_keys
from models.core.program import Program
from models.families.transformer_xl import TransformerXL, TransformerXLConfig
from models.families.xlnet import XLNet, XLNetConfig, both_masks
from tests.models.programs import QUICK, with_gradients
from tests.models.shapes import parameter_shapes

BATCH, WIDTH = 2, 128
KEYS = row_keys(0, 0, jnp.arange(BATCH))


def xlnet_masks(rng, length, memory, n):
    """Two segments, three types, a random order, some of the memory empty; one prediction that sees nothing."""
    ranks = np.argsort(rng.random((BATCH, length)), axis=1).astype(np.int32)
    segments = np.ones((BATCH, length), np.int32)
    segments[1, length // 3 :] = 2
    types = np.sort(rng.integers(0, 3, (BATCH, length)), axis=1).astype(np.int32)
    positions = np.sort(np.argsort(rng.random((BATCH, length)), axis=1)[:, :n], axis=1).astype(np.int32)
    thresholds = ranks.copy()
    remembered = (np.arange(memory) >= np.array([[0], [memory // 2]])).astype(np.int32)
    thresholds[0, positions[0, 0]] = 0
    remembered[0] = 7
    return both_masks(types, segments, ranks, thresholds, positions, jnp.asarray(remembered))


def case(kind, head_dim, dtype, length=256, memory=128, n=30):
    """(q, context, biases), the mask, the types, the number of heads."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    content, query = xlnet_masks(rng, length, memory, n)
    causal = jnp.arange(length)[None].repeat(BATCH, 0)
    ones = jnp.ones_like(causal)
    without_types = remembering(jnp.ones((BATCH, memory), jnp.int32), Mask(ones, causal, causal + 1)), None
    spread = np.linspace([0, 1], [length - 2, length - 1], n, axis=1, dtype=np.int32)
    themselves = chosen(content[0], spread), content[1]._replace(queries=gather_positions(content[1].queries, spread))
    kinds = {"content": content, "query": query, "causal": without_types, "themselves": themselves}
    mask, types = kinds[kind]
    keys, typed = length + memory, kind != "causal"
    distances = keys + (length if typed else 1)
    number = mask.own.shape[1]
    context = Context(draw(BATCH, keys, WIDTH), draw(BATCH, keys, WIDTH), draw(BATCH if typed else 1, distances, WIDTH))
    biases = Biases(draw(WIDTH), draw(WIDTH), *((draw(WIDTH), draw(2, WIDTH)) if typed else ()))
    return draw(BATCH, number, WIDTH), context, biases, mask, types, WIDTH // head_dim


def compare(arguments, tolerance, rate=0.0):
    """The kernel against the plain operations, which get float32: in bfloat16 they round the sums for the biases."""
    q, context, biases, mask, types, heads = arguments
    weights = np.random.default_rng(1).normal(size=q.shape)
    noise = {"dropout_rate": rate, "noise": KEYS if rate else None}
    both = []
    given = (q, context, biases)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    for attend, inputs in ((relative_attention, wide), (functools.partial(by_kernel, interpret=True), given)):
        of_mask = functools.partial(lambda attend, *x: attend(*x, mask, types, heads, **noise), attend)
        both.append(with_gradients(of_mask, weights)(*inputs))
    (expected, expected_gradients), (ours, gradients) = both
    assert ours.dtype == q.dtype
    near(ours, expected, tolerance)
    jax.tree.map(lambda a, b: near(a, b, 3 * tolerance), gradients, expected_gradients)
    return np.asarray(ours, np.float32)


def near(ours, expected, tolerance):
    ours, expected = (np.asarray(x, np.float32) for x in (ours, expected))
    np.testing.assert_allclose(ours, expected, atol=tolerance * np.abs(expected).max())


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        *(pytest.param(kind, 0.0, marks=SLOW) for kind in ("content", "query")),
        ("causal", 0.0),
        *((kind, 0.3) for kind in ("content", "query", "causal")),
        ("themselves", 0.0),  # chosen queries that see themselves
    ],
)
def test_outputs_and_gradients_are_those_of_the_plain_operations(kind, rate):
    out = compare(case(kind, 64, jnp.float32), 1e-5, rate)
    if kind == "query":
        assert not out[0, 0].any() and out[0, 1].any()  # the first prediction sees nothing


@pytest.mark.parametrize("head_dim", [pytest.param(32, marks=SLOW), 128])
def test_heads_of_other_sizes(head_dim):
    compare(case("content", head_dim, jnp.float32, length=128, memory=0), 1e-5, 0.3)


@pytest.mark.parametrize("kind", [pytest.param("content", marks=SLOW), "query"])
def test_bfloat16_is_near(kind):
    compare(case(kind, 64, jnp.bfloat16, length=128), 0.02, 0.3)


@pytest.mark.parametrize(("length", "memory", "n"), [pytest.param(384, 0, 200, marks=SLOW), (128, 128, 128)])
def test_a_reach_of_any_number_of_blocks(length, memory, n):
    compare(case("query", 64, jnp.float32, length, memory, n), 1e-5)


@pytest.mark.parametrize(
    ("n", "keys", "distances", "heads", "chosen", "said"),
    [
        (512, 896, 1408, 2, False, None),
        (86, 896, 1408, 2, True, None),
        (86, 896, 1408, 2, False, "length=86: choose a multiple of 128"),
        (512, 900, 1412, 2, False, "memory=388: choose a multiple of 128"),
        (512, 896, 1408, 3, False, "model.heads=3 in model.width=128 do not fill blocks of 128"),
        (1024, 1152, 2176, 2, False, "length=1024 with memory=128 has 2176 distances, more than 2048"),
        # Chosen queries reach a power of two: 896 keys and 1024 distances more are few enough, 1152 and 1024 are not.
        (86, 896, 1664, 2, True, None),
        (86, 1152, 1920, 2, True, "length=768 with memory=384 has 2176 distances"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_reason(n, keys, distances, heads, chosen, said):
    context = Context(*(jnp.zeros((1, number, WIDTH)) for number in (keys, keys, distances)))
    mask = Mask(None, ranks=jnp.zeros((1, keys)), after=jnp.zeros((1, n)) if chosen else None)
    attention = asked(jnp.zeros((1, n, WIDTH)), context, mask, heads, 0.3)
    assert (attention.length + attention.memory, attention.chosen) == (keys, chosen)
    if said is None:
        assert require("relative", "relative", attention).attend is by_kernel
        return
    with pytest.raises(ValueError, match=f"attention relative does not work here: .*{said}.*; or use xla"):
        require("relative", "relative", attention)


@pytest.mark.parametrize(
    ("causal", "ranked", "said"),
    [
        (True, True, ["the mask has causal=True, which it does not read: say it by ranks and thresholds alone"]),
        (True, False, ["the mask has causal=True, which it does not read: say it by ranks and thresholds alone"]),
        (False, False, ["the mask has no ranks, which it needs: give it ranks and thresholds"]),
        (False, True, []),
    ],
)
def test_a_mask_that_does_not_fit_is_named_as_it_is(causal, ranked, said):
    assert KERNELS["relative"].obstacles(Attention(128, 128, 2, 0.1, causal=causal, ranked=ranked)) == said


XLNET = XLNetConfig(vocab_size=60, width=128, depth=2, heads=2, feed_forward=32, memory=128)
TRANSFORMER_XL = TransformerXLConfig(60, 128, 2, 2, 32, dropout=0.0, attention_dropout=0.1, memory=128, cutoffs=())


def loss_of(config, attention, remat="none"):
    """(a model's loss as a function of its parameters, parameters)"""
    rng, shapes = np.random.default_rng(0), parameter_shapes(config)
    tokens, ones = rng.integers(0, 60, (BATCH, 128)), jnp.ones((BATCH, 128), jnp.int32)
    program = Program(attention=attention, remat=remat)
    hidden = jnp.asarray(rng.normal(size=(2, BATCH, 128, 128)), jnp.float32)
    memory = Memory(hidden, ones)
    if isinstance(config, XLNetConfig):
        ranks = jnp.asarray(np.argsort(rng.random((BATCH, 128)), axis=1).astype(np.int32))
        positions, backwards = jnp.asarray([[3, 9, 70], [0, 5, 127]]), jnp.asarray([0, 1])
        rows = {"types": ones, "ranks": ranks, "thresholds": ranks, "reversed": backwards}
        model, method, rest = XLNet(config, program), "query", (memory, positions, 64, KEYS)
    else:
        model, method, rows, rest = TransformerXL(config, program), "read", {}, (memory, KEYS)
    inputs = {"tokens": tokens, "segments": ones} | rows
    draw = lambda leaf: np.random.default_rng(leaf.size).normal(0, 0.1, leaf.shape).astype(np.float32)
    loss = lambda params: model.apply({"params": params}, inputs, *rest, method=method)[0][..., :5].sum()
    return loss, jax.tree.map(draw, shapes)


@pytest.mark.parametrize("config", [XLNET, TRANSFORMER_XL], ids=["xlnet", "transformer-xl"])
def test_a_model_with_the_kernel_is_the_same_model(monkeypatch, config):
    """With dropout, a memory and rows that run backwards."""
    interpreted = KERNELS["relative"]._replace(attend=functools.partial(by_kernel, interpret=True))
    monkeypatch.setitem(KERNELS, "relative", interpreted)
    results = []
    for attention in ("relative", "xla"):
        loss, params = loss_of(config, attention, remat="dots")
        results.append(jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params))
    (one, ours), (other, theirs) = results
    np.testing.assert_allclose(one, other, rtol=1e-5)
    jax.tree.map(lambda a, b: near(a, b, 2e-5), ours, theirs)


@pytest.mark.parametrize("remat, runs", [("none", 1), ("dots", 1), ("full", 2)])
def test_rematerialisation_of_all_but_products_does_not_run_a_kernel_twice(remat, runs):
    loss, params = loss_of(TRANSFORMER_XL, "relative", remat)
    assert str(jax.make_jaxpr(jax.grad(loss))(params)).count("name=relative_whole_forward") == runs
