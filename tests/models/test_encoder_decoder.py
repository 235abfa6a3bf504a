"""An encoder beside a decoder: distances in buckets, who sees whom, and a cache that gives the same as whole rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from models.attention.distances import Buckets, bucket_of, by_key, next_bias, row_bias
from models.attention.encoder_decoder import INPUTS
from models.core.program import Program
from models.families.t5 import T5Config
from pretrain.training.assembly import model_of
from tests.contract import cases
from tests.models.shapes import parameter_shapes

CONFIG = T5Config(
    vocab_size=50, width=16, depth=2, decoder_depth=3, heads=2, head_dim=6, feed_forward=24, buckets=8, furthest=10
)
ROWS, LENGTH, TARGET = 3, 9, 6


@pytest.mark.parametrize("number, furthest", [(32, 128), (8, 10), (16, 64)])
@pytest.mark.parametrize("ahead", [True, False])
def test_buckets_are_transformers(number, furthest, ahead):
    distances = np.arange(-3000, 3000)
    theirs = T5Attention._relative_position_bucket(torch.from_numpy(distances), ahead, number, furthest)
    np.testing.assert_array_equal(bucket_of(distances, Buckets(number, furthest, ahead)), theirs.numpy())


def test_a_bias_is_the_tables_of_the_keys_distance_in_whole_rows_and_after_others():
    buckets = Buckets(8, 10, ahead=True)
    table = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    whole = by_key(row_bias(table, 7, 12, buckets), 12)
    distances = np.arange(12) - np.arange(7)[:, None]
    of_each = table[bucket_of(distances.ravel(), buckets)]
    np.testing.assert_array_equal(whole[0], of_each.T.reshape(3, 7, 12))
    np.testing.assert_array_equal(next_bias(table, 2, 12, jnp.int32(5), buckets)[0], whole[0, :, 5:7])


@functools.cache
def made():
    """(model, parameters, inputs): two texts share the first row, and the second one has padding."""
    model, rng = model_of(CONFIG, (), Program()), np.random.default_rng(1)
    shapes = parameter_shapes(CONFIG)
    params = jax.tree.map(lambda s: rng.normal(0.0, 0.3, s.shape).astype(np.float32), shapes)
    segments, of_decoder = np.ones((ROWS, LENGTH), np.int32), np.ones((ROWS, TARGET), np.int32)
    segments[0, 5:], of_decoder[0, 3:], segments[1, 6:] = 2, 2, 0
    draw = lambda *shape: rng.integers(1, 50, shape).astype(np.int32)
    inputs = {"tokens": draw(ROWS, LENGTH), "segments": segments}
    return model, params, inputs | {"decoder_tokens": draw(ROWS, TARGET), "decoder_segments": of_decoder}


@functools.cache
def gradient():
    """Of what the decoder knows at a place of a row, by the distributions of tokens."""
    model, params, inputs = made()

    def known(spread, row, place):
        hidden = model.apply({"params": params}, inputs | spread, method="decode_targets")
        return jnp.square(hidden[row, place]).sum()

    return jax.jit(jax.grad(known))


def read_by(row, place):
    """Which tokens of the encoder and of the decoder have a gradient there."""
    spread = {name: jax.nn.one_hot(made()[2][name], 128) for name in ("tokens", "decoder_tokens")}
    gradients = gradient()(spread, row, place)
    return [np.argwhere(np.any(gradients[name] != 0, axis=-1)).tolist() for name in spread]


def test_a_token_of_the_decoder_reads_its_text_of_the_encoder_and_what_is_before_it_and_nothing_else():
    assert read_by(0, 1) == [[[0, i] for i in range(5)], [[0, 0], [0, 1]]]
    assert read_by(0, 4) == [[[0, i] for i in range(5, 9)], [[0, 3], [0, 4]]]
    assert read_by(1, 2) == [[[1, i] for i in range(6)], [[1, 0], [1, 1], [1, 2]]]


def test_logits_of_a_softmax_of_its_own_begin_near_one():
    model = model_of(dataclasses.replace(CONFIG, width=256, tied=False), (), Program())
    (logits, _), _ = jax.jit(model.init_with_output)(jax.random.key(0), made()[2])
    assert 0.5 < logits[:, : CONFIG.vocab_size].std() < 1.5


def test_tokens_one_by_one_with_a_cache_give_what_whole_rows_give():
    model, params, inputs = made()
    apply = lambda method, *given: jax.jit(functools.partial(model.apply, {"params": params}, method=method))(*given)
    inputs = {name: array[1:] for name, array in inputs.items()}  # of one text each
    inputs["decoder_tokens"] = inputs["decoder_tokens"] * (np.arange(TARGET) > 0)  # the token that begins texts is 0
    whole = apply("decode_targets", inputs)
    hidden, cache = model.apply({"params": params}, inputs, TARGET + 1, method="begin")
    known = [hidden]
    for tokens in np.split(inputs["decoder_tokens"][:, 1:], [1], axis=1):
        more = {"tokens": tokens, "segments": np.ones_like(tokens)}
        hidden, cache = apply("advance", more, cache)
        known.append(hidden)
    np.testing.assert_allclose(np.concatenate(known, axis=1), whole, atol=2e-6)

    def step(cache, *tokens):
        tokens = np.array(tokens, np.int32)[:, None]
        return apply("advance", {"tokens": tokens, "segments": np.ones_like(tokens)}, cache)

    of_beams = model.take(cache, jnp.array([0, 0, 1, 1]))
    first, of_beams = step(of_beams, 7, 9, 7, 9)
    np.testing.assert_allclose(first[::2], step(cache, 7, 7)[0], atol=1e-6)
    order, there = np.array([1, 0, 3, 3]), step(of_beams, 5, 5, 5, 5)[0]
    np.testing.assert_allclose(step(model.take(of_beams, order), 5, 5, 5, 5)[0], there[order], atol=1e-6)


def torch_layer(kind, params, layer, config):
    """torch's layer with the parameters of one of ours."""
    of = lambda block, *path: torch.from_numpy(functools.reduce(dict.get, path, params[block])[layer].copy())
    attention = {"attention": "self_attn", "cross_attention": "multihead_attn"}
    blocks = [block for block in (*attention, "feed_forward") if block in params]
    filled = {}
    for number, block in enumerate(blocks, 1):
        filled[f"norm{number}.weight"] = of(block, "norm", "scale")
        filled[f"norm{number}.bias"] = of(block, "norm", "bias")
    for block in blocks[:-1]:
        parts, theirs = ("query", "key", "value"), attention[block]
        filled[f"{theirs}.in_proj_weight"] = torch.cat([of(block, part, "kernel").T for part in parts])
        filled[f"{theirs}.in_proj_bias"] = torch.cat([of(block, part, "bias") for part in parts])
        filled |= dense(f"{theirs}.out_proj", of(block, "output", "kernel"), of(block, "output", "bias"))
    for theirs, ours in {"linear1": "up", "linear2": "down"}.items():
        filled |= dense(theirs, of("feed_forward", ours, "kernel"), of("feed_forward", ours, "bias"))
    made = kind(config.width, config.heads, config.feed_forward, dropout=0.0, batch_first=True)
    made.load_state_dict(filled)
    return made.eval()


def dense(name, kernel, bias):
    return {f"{name}.weight": kernel.T, f"{name}.bias": bias}


def test_the_transformers_layers_are_torchs():
    case, batch = cases.CASES["transformer"], cases.batch(cases.CASES["transformer"])
    config, params, tensor = case.model, cases.params(case), lambda name: torch.from_numpy(np.array(batch[name]))
    angles = np.arange(cases.LENGTH)[:, None] / 10000 ** (np.arange(0, config.width, 2) / config.width)
    places = torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32))

    def embedded(name):
        rows = torch.from_numpy(params["tokens"])[tensor(name).long()] * config.width**0.5
        return rows + places[: rows.shape[1]]

    padding, x = tensor("segments") == 0, embedded("tokens")
    for layer in range(config.depth):
        kind = torch.nn.TransformerEncoderLayer
        x = torch_layer(kind, params["encoder"]["layers"], layer, config)(x, src_key_padding_mask=padding)
    y = embedded("decoder_tokens")
    causal = torch.nn.Transformer.generate_square_subsequent_mask(y.shape[1])
    for layer in range(config.decoder_depth):
        of_layer = torch_layer(torch.nn.TransformerDecoderLayer, params["decoder"]["layers"], layer, config)
        y = of_layer(y, x, tgt_mask=causal, memory_key_padding_mask=padding)
    model = model_of(config, (), Program())
    found = model.apply({"params": params}, {name: batch[name] for name in INPUTS}, method="decode_targets")
    np.testing.assert_allclose(found, y.detach().numpy(), rtol=1e-5, atol=1e-5)
