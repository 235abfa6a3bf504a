"""Transformer-XL: a memory is a longer row cut in pieces, clusters are one softmax; the contract has parity."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import relative as attention
from models.attention.mask import Mask
from models.attention.operands import Biases
from models.attention.relative import sinusoids
from models.blocks.memory import Memory
from models.core.noise import row_keys, site
from models.core.program import Program
from models.families.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLLayer
from tests.models.shapes import random_params

CONFIG = TransformerXLConfig(
    vocab_size=60, width=16, depth=3, heads=2, feed_forward=24, dropout=0.0, memory=5, cutoffs=()
)
SCAN = Program()
CLUSTERED = dataclasses.replace(CONFIG, cutoffs=(10, 30), divisor=2)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 60, (2, 24)).astype(np.int32)
ONES = np.ones_like(TOKENS)
KEYS = row_keys(0, 0, jnp.arange(2))


@functools.cache
def compiled(config, program):
    module = TransformerXL(config, program)
    return jax.jit(lambda params, *inputs: module.apply({"params": params}, *inputs, method="read"))


def forward(config, tokens, segments, memory, keys=None, program=SCAN):
    return compiled(config, program)(random_params(config), {"tokens": tokens, "segments": segments}, memory, keys)


def in_pieces(config, tokens, segments, length, remembered):
    """Hidden states of a long row that is given `length` tokens at a time."""
    memory = TransformerXL(config, SCAN).empty_memory(len(tokens), remembered)
    hidden = []
    for start in range(0, tokens.shape[1], length):
        piece = slice(start, start + length)
        new, memory = forward(config, tokens[:, piece], segments[:, piece], memory)
        hidden.append(new)
    return np.concatenate(hidden, axis=1)


def test_pieces_with_a_memory_of_everything_are_the_whole_row():
    whole = in_pieces(CONFIG, TOKENS, ONES, 24, 0)
    for length in (1, 6, 24):
        np.testing.assert_allclose(in_pieces(CONFIG, TOKENS, ONES, length, 24), whole, atol=2e-5)


def test_pieces_with_a_short_memory_are_the_whole_row_under_a_band(monkeypatch):
    """A piece of 6 that remembers 8 sees up to 8 positions before its start, at every layer."""
    ours, params = in_pieces(CONFIG, TOKENS, ONES, 6, 8), random_params(CONFIG)
    query, key = np.arange(24)[:, None], np.arange(24)
    band = (key <= query) & (key >= query // 6 * 6 - 8)
    module = TransformerXL(CONFIG, SCAN)
    x = module.apply({"params": params}, TOKENS, method="embed")
    biases = Biases(params["content_bias"], params["position_bias"])
    monkeypatch.setattr(attention, "visible", lambda mask: jnp.broadcast_to(band, (2, 1, 24, 24)))
    shared = (sinusoids(23, -1, 16)[None], Mask(jnp.ones((2, 24), jnp.int32)), biases)
    layer = TransformerXLLayer(CONFIG, SCAN).apply
    for index in range(CONFIG.depth):
        weights = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        x, _ = layer({"params": weights}, x, shared, None, jnp.zeros((2, 0, 16)), None)
    np.testing.assert_allclose(ours, x, atol=2e-5)


def test_memory_of_another_segment_is_not_seen():
    segments = np.where(np.arange(24) < 12, 1, 2) * ONES
    both = in_pieces(CONFIG, TOKENS, segments, 6, 12)
    alone = in_pieces(CONFIG, TOKENS[:, 12:], segments[:, 12:], 6, 12)
    np.testing.assert_allclose(both[:, 12:], alone, atol=2e-5)


@pytest.mark.parametrize("remembered", [0, 4, 9])
def test_a_token_changes_nothing_before_it_and_everything_that_sees_it(remembered):
    rng = np.random.default_rng(remembered)
    memory = Memory(rng.normal(size=(3, 2, remembered, 16)).astype(np.float32), np.ones((2, remembered), np.int32))
    before, _ = forward(CONFIG, TOKENS[:, :12], ONES[:, :12], memory)
    for at in (0, 5, 11):
        tokens = TOKENS[:, :12].copy()
        tokens[:, at] = (tokens[:, at] + 1) % 60
        after, _ = forward(CONFIG, tokens, ONES[:, :12], memory)
        changed = (np.asarray(before) != np.asarray(after)).any(axis=-1)
        np.testing.assert_array_equal(changed, np.broadcast_to(np.arange(12) >= at, (2, 12)))


def test_memory_keeps_its_length_its_latest_tokens_and_no_gradient():
    rng = np.random.default_rng(1)
    memory = Memory(rng.normal(size=(3, 2, 5, 16)).astype(np.float32), np.full((2, 5), 7, np.int32))
    _, new = forward(CONFIG, TOKENS[:, :3], ONES[:, :3], memory)
    np.testing.assert_array_equal(new.segments, [[7, 7, 1, 1, 1]] * 2)
    np.testing.assert_array_equal(new.hidden[:, :, :2], memory.hidden[:, :, 3:])
    embedded = TransformerXL(CONFIG, SCAN).apply({"params": random_params(CONFIG)}, TOKENS[:, :3], method="embed")
    np.testing.assert_allclose(new.hidden[0, :, 2:], embedded, rtol=1e-6)

    inputs = {"tokens": TOKENS[:, :3], "segments": ONES[:, :3]}
    kept = lambda params: jnp.sum(compiled(CONFIG, SCAN)(params, inputs, memory, None)[1].hidden)
    assert not any(leaf.any() for leaf in jax.tree.leaves(jax.grad(kept)(random_params(CONFIG))))


def test_clusters_embed_and_score_each_token_by_its_own_table():
    module, params = TransformerXL(CLUSTERED, SCAN), random_params(CLUSTERED)
    hidden = RNG.normal(size=(4, 16)).astype(np.float32)
    tails = module.apply({"params": params}, hidden, method="tails")
    first = module.apply({"params": params}, hidden, method="token_logits")
    pieces = [first, *(h @ table.T + b for h, table, b in tails)]
    embedded = np.asarray(module.apply({"params": params}, np.arange(60)[None], method="embed"))[0] / 4
    for number, (start, end) in enumerate([(0, 10), (10, 30), (30, 60)]):
        tables = params[f"cluster_{number}"]
        assert tables["tokens"].shape == (128, 16 // 2**number)
        rows = tables["tokens"][: end - start]
        np.testing.assert_allclose(embedded[start:end], rows @ tables["projection"], atol=1e-5)
        narrow = hidden @ tables.get("output_projection", tables["projection"]).T
        expected = narrow @ tables["tokens"].T + tables["bias"]
        logits = pieces[number]
        used = 12 if number == 0 else end - start  # the head's last two rows stand for the two other clusters
        np.testing.assert_allclose(logits[:, :used], expected[:, :used], atol=1e-4)
        assert (np.asarray(logits[:, used:]) == -np.inf).all()


def test_cutoffs_beyond_the_vocabulary_do_nothing():
    assert dataclasses.replace(CLUSTERED, vocab_size=30).clusters == (10,)
    assert dataclasses.replace(CLUSTERED, vocab_size=10).clusters == ()


def test_noise_belongs_to_its_row():
    config = dataclasses.replace(CONFIG, dropout=0.3, attention_dropout=0.3)
    memory = TransformerXL(config, SCAN).empty_memory(2)
    both, _ = forward(config, TOKENS, ONES, memory, KEYS)
    assert not np.allclose(both, forward(config, TOKENS, ONES, memory, site(KEYS, 5))[0])
    there, _ = forward(config, TOKENS[::-1], ONES, memory, KEYS[::-1])
    np.testing.assert_allclose(there[::-1], both, atol=2e-5)
