"""The kernel of relative attention gives the numbers, the gradients and the noise of the plain operations."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.kernels.kernel import Attention
from models.attention.kernels.relative_kernel import by_kernel
from models.attention.kernels.table import KERNELS, require
from models.attention.mask import Mask, chosen, remembering
from models.attention.operands import Biases, Context
from models.attention.relative import attention_spec, relative_attention
from models.blocks.memory import Memory
from models.blocks.positions import gather_positions
from models.core.noise import row_keys
from models.core.program import Program
from models.families.transformer_xl import TransformerXL, TransformerXLConfig
from models.families.xlnet import XLNet, XLNetConfig, both_masks
from tests.models.programs import STRICT, interpreted, with_gradients
from tests.models.shapes import random_params

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


def operands(kind, head_dim, dtype, length, memory, n):
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
    number = mask.query_segments.shape[1]
    context = Context(draw(BATCH, keys, WIDTH), draw(BATCH, keys, WIDTH), draw(BATCH if typed else 1, distances, WIDTH))
    biases = Biases(draw(WIDTH), draw(WIDTH), *((draw(WIDTH), draw(2, WIDTH)) if typed else ()))
    return draw(BATCH, number, WIDTH), context, biases, mask, types, WIDTH // head_dim


def near(ours, expected, tolerance):
    ours, expected = (np.asarray(x, np.float32) for x in (ours, expected))
    np.testing.assert_allclose(ours, expected, atol=tolerance * np.abs(expected).max())


class Case(NamedTuple):
    """strict: whether it is looked at that no memory is read that nobody wrote, or outside of blocks, and for races."""

    kind: str
    rate: float
    head_dim: int = 64
    length: int = 256
    memory: int = 128
    n: int = 30
    dtype: type = jnp.float32
    strict: bool = False


CASES = [
    pytest.param(Case("query", 0.3, length=128, n=20, strict=True), marks=pytest.mark.slow),
    Case("causal", 0.3, length=128, n=20, strict=True),
    Case("content", 0.3),
    Case("themselves", 0.0),  # chosen queries that see themselves
    Case("content", 0.3, head_dim=128, length=128, memory=0),
    Case("query", 0.3, length=128, dtype=jnp.bfloat16),
    pytest.param(Case("query", 0.0, length=128, n=128), marks=pytest.mark.slow),
    pytest.param(Case("content", 0.3, length=128, n=20, strict=True), marks=pytest.mark.slow),
    pytest.param(Case("content", 0.3, head_dim=32, length=128, memory=0), marks=pytest.mark.slow),
    pytest.param(Case("query", 0.0, length=384, memory=0, n=200), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_plain_operations(case, capfd):
    """Which get float32: in bfloat16 they round the sums for the biases."""
    rate, tolerance = case.rate, 1e-5 if case.dtype == jnp.float32 else 0.02
    *given, mask, types, heads = operands(case.kind, case.head_dim, case.dtype, case.length, case.memory, case.n)
    weights = np.random.default_rng(1).normal(size=given[0].shape)
    rest = lambda attend, *x: attend(*x, mask, types, heads, dropout_rate=rate, noise=KEYS if rate else None)
    kernel = functools.partial(by_kernel, interpret=STRICT if case.strict else True)
    both = []
    for attend, inputs in ((relative_attention, jax.tree.map(lambda x: x.astype(jnp.float32), given)), (kernel, given)):
        both.append(with_gradients(functools.partial(rest, attend), weights)(*inputs))
    (expected, expected_gradients), (ours, gradients) = both
    assert ours.dtype == case.dtype and "RACE DETECTED" not in capfd.readouterr().out
    near(ours, expected, tolerance)
    jax.tree.map(lambda a, b: near(a, b, 3 * tolerance), gradients, expected_gradients)
    if case.kind == "query":
        assert not ours[0, 0].any() and ours[0, 1].any()  # the first prediction sees nothing


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
    attention = attention_spec(jnp.zeros((1, n, WIDTH)), context, mask, heads, 0.3)
    assert (attention.length + attention.memory, attention.chosen) == (keys, chosen)
    if said is None:
        assert require("relative", "relative", attention).mixing(attention).mix is by_kernel
        return
    with pytest.raises(ValueError, match=f"attention relative does not work here: .*{said}.*; or use xla"):
        require("relative", "relative", attention)


@pytest.mark.parametrize(
    ("causal", "ranked", "said"),
    [
        (True, True, ["the mask has causal=True, which it does not read: express it by ranks and thresholds only"]),
        (True, False, ["the mask has causal=True, which it does not read: express it by ranks and thresholds only"]),
        (False, False, ["the mask has no ranks, which it needs: give it ranks and thresholds"]),
        (False, True, []),
    ],
)
def test_a_mask_that_does_not_fit_is_named_as_it_is(causal, ranked, said):
    assert KERNELS["relative"].obstacles(Attention(128, 128, 2, 0.1, causal=causal, ranked=ranked)) == said


XLNET = XLNetConfig(vocab_size=60, width=128, depth=2, heads=2, feed_forward=32, memory=128)
TRANSFORMER_XL = TransformerXLConfig(60, 128, 1, 2, 32, dropout=0.0, attention_dropout=0.1, memory=128, cutoffs=())


def outputs_of(config, attention, remat="none"):
    """(a model's outputs as a function of its parameters, parameters); with dropout, a memory and reversed rows."""
    rng = np.random.default_rng(0)
    tokens, ones = rng.integers(0, 60, (BATCH, 128)), jnp.ones((BATCH, 128), jnp.int32)
    program = Program(attention=attention, remat=remat)
    memory = Memory(jnp.asarray(rng.normal(size=(config.depth, BATCH, 128, 128)), jnp.float32), ones)
    if isinstance(config, XLNetConfig):
        ranks = jnp.asarray(np.argsort(rng.random((BATCH, 128)), axis=1).astype(np.int32))
        positions, backwards = jnp.asarray([[3, 9, 70], [0, 5, 127]]), jnp.asarray([0, 1])
        rows = {"types": ones, "ranks": ranks, "thresholds": ranks, "reversed": backwards}
        model, method, rest = XLNet(config, program), "query", (memory, positions, 64, KEYS)
    else:
        model, method, rows, rest = TransformerXL(config, program), "read", {}, (memory, KEYS)
    inputs = {"tokens": tokens, "segments": ones} | rows
    run = lambda params: model.apply({"params": params}, inputs, *rest, method=method)[0]
    return run, random_params(config, 0.1)


@pytest.mark.parametrize("config", [XLNET, TRANSFORMER_XL], ids=["xlnet", "transformer-xl"])
def test_a_model_with_the_kernel_is_the_same_model(monkeypatch, config):
    monkeypatch.setitem(KERNELS, "relative", interpreted(KERNELS["relative"]))
    (ours, params), (theirs, _) = (outputs_of(config, attention) for attention in ("relative", "xla"))
    near(*jax.jit(lambda params: (ours(params), theirs(params)))(params), 2e-5)


@pytest.mark.parametrize("remat, runs", [("dots", 1), ("full", 2)])
def test_rematerialisation_of_all_but_products_does_not_run_a_kernel_twice(remat, runs):
    outputs, params = outputs_of(TRANSFORMER_XL, "relative", remat)
    traced = jax.make_jaxpr(jax.grad(lambda params: outputs(params).sum()))(params)
    assert str(traced).count("name=relative_whole_forward") == runs
