"""Prompts continued in one compiled loop, token by token, with a cache."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from models.attention.cache import Cache
from models.core.noise import fold
from models.core.parameters import Params
from models.core.sharding import placed_by
from pretrain.generation.choice import choose, penalised
from pretrain.generation.settings import Decoding
from tpu.rules import activation_rules
from tpu.xla import compiler_options, matmul_precision


class Texts(NamedTuple):
    """Rows that are being written.

    tokens: i32[rows, max_tokens], of which `written` stand.   done: bool[rows], whether a stop token stands.
    lengths: i32[rows], tokens with the prompt's.   seen: bool[rows, vocab], which of them stand; None if nobody asks.
    """

    tokens: Array
    written: Array
    done: Array
    lengths: Array
    seen: Array | None
    cache: Cache


@functools.cache
def program(model: nn.Module, decoding: Decoding, mesh: Mesh) -> Callable[[Params, Array, Array, Array], Array]:
    """To continue left-padded prompts: (params, tokens and segments i32[rows, places], noise u32[rows, 2]) ->
    i32[rows, texts of each, max_tokens]; what follows a stop token means nothing."""

    def write(params: Params, tokens: Array, segments: Array, noise: Array) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            return _texts(model, decoding, params, tokens, segments, noise)[:, None]

    return jax.jit(write, compiler_options=compiler_options(mesh))


def _texts(model: nn.Module, decoding: Decoding, params: Params, tokens: Array, segments: Array, noise: Array) -> Array:
    stop = jnp.array(decoding.stop, jnp.int32)

    def add(texts: Texts, logits: Array) -> Texts:
        logits = penalised(logits, texts.seen, decoding.repetition_penalty)
        new = choose(logits, fold(noise, texts.written), decoding)
        written = jax.lax.dynamic_update_slice_in_dim(texts.tokens, new[:, None], texts.written, axis=1)
        seen = None if texts.seen is None else with_seen(texts.seen, new[:, None], True)
        done = texts.done | jnp.isin(new, stop)
        return texts._replace(tokens=written, written=texts.written + 1, done=done, seen=seen)

    def step(texts: Texts) -> Texts:
        last = jax.lax.dynamic_slice_in_dim(texts.tokens, texts.written - 1, 1, axis=1)
        logits, cache = next_logits(model, params, last, texts.lengths, texts.cache)
        return add(texts._replace(lengths=texts.lengths + 1, cache=cache), logits)

    def goes_on(texts: Texts) -> Array:
        return (texts.written < decoding.max_tokens) & ~texts.done.all()

    logits, cache = read(model, params, tokens, segments, decoding.max_tokens)
    rows = len(tokens)
    empty = jnp.zeros((rows, decoding.max_tokens), jnp.int32)
    seen = first_seen(decoding, logits, tokens, segments)
    texts = Texts(empty, jnp.int32(0), jnp.zeros(rows, bool), segments.sum(1), seen, cache)
    return jax.lax.while_loop(goes_on, step, add(texts, logits)).tokens


def read(model: nn.Module, params: Params, tokens: Array, segments: Array, more: int) -> tuple[Array, Cache]:
    """Left-padded prompts -> (logits f32[rows, vocab] after each, a cache of them with room for `more` tokens)."""
    rows, places = tokens.shape
    positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
    inputs = {"tokens": tokens, "segments": segments, "positions": positions}
    hidden, cache = model.apply({"params": params}, inputs, model.empty_cache(rows, places + more), method="extend")
    return model.apply({"params": params}, hidden[:, -1:], method="token_logits"), cache


def next_logits(model: nn.Module, params: Params, last: Array, lengths: Array, cache: Cache) -> tuple[Array, Cache]:
    """Of one more token i32[rows, 1] in texts of these lengths i32[rows] -> (logits f32[rows, vocab], the cache)."""
    inputs = {"tokens": last, "segments": jnp.ones_like(last), "positions": lengths[:, None]}
    hidden, cache = model.apply({"params": params}, inputs, cache, method="extend")
    return model.apply({"params": params}, hidden, method="token_logits"), cache


def first_seen(decoding: Decoding, logits: Array, tokens: Array, segments: Array) -> Array | None:
    """Which tokens stand in prompts, bool[rows, vocab]; None where no penalty asks."""
    if decoding.repetition_penalty == 1:
        return None
    return with_seen(jnp.zeros(logits.shape, bool), tokens, segments > 0)


def with_seen(seen: Array, tokens: Array, real: Array | bool) -> Array:
    """seen bool[rows, vocab] and tokens i32[rows, n], where they are real."""
    return seen.at[jnp.arange(len(tokens))[:, None], tokens].max(real)
