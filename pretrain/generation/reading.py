"""What a causal model says of next tokens, with a cache of what it has read."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention.cache import Cache
from models.blocks.products import FEW_ROWS, turned_weights
from models.core.family import Inputs
from models.core.parameters import LAYERS, Params


def read(model: nn.Module, params: Params, tokens: Array, segments: Array, more: int) -> tuple[Array, Cache]:
    """Left-padded prompts -> (logits f32[rows, vocab] after each, a cache of them with room for `more` tokens).

    params: as of `apart`.
    """
    rows, places = tokens.shape
    return _logits(model, params, of_texts(tokens, segments), model.empty_cache(rows, places + more))


def next_logits(model: nn.Module, params: Params, last: Array, lengths: Array, cache: Cache) -> tuple[Array, Cache]:
    """Of one more token i32[rows, 1] in texts of these lengths i32[rows] -> (logits f32[rows, vocab], the cache).

    params: as of `apart`.
    """
    if model.program.depth == "unroll":
        cache = cache._replace(keys=jnp.stack(cache.keys), values=jnp.stack(cache.values))
    return _logits(model, params, of_next(last, lengths), cache)


def of_texts(tokens: Array, segments: Array) -> Inputs:
    """What a model is given of left-padded texts, i32[rows, places] both."""
    return {"tokens": tokens, "segments": segments, "positions": jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)}


def of_next(tokens: Array, lengths: Array) -> Inputs:
    """What it is given of one more token in texts of these lengths i32[rows]: i32[rows, 1], or a distribution of it
    f32[rows, 1, padded vocab] as `token_rows` takes it."""
    positions = lengths[:, None]
    return {"tokens": tokens, "segments": jnp.ones_like(positions), "positions": positions}


def apart(model: nn.Module, params: Params) -> Params:
    """Parameters for a loop over tokens: of an unrolled program a list of the layers', as a cache is that `read` gives,
    with matrices as [out, in] for `turned_weights`. Those that are so already stay.

    A loop that holds them stacked would cut every layer's out of the stack again for every token, which on a CPU copies
    all weights and the cache; stacked inside it and cut at once, nothing is copied.
    """
    if model.program.depth == "scan" or isinstance(params[LAYERS], list):
        return params
    leaves, structure = jax.tree.flatten(params[LAYERS])
    layers = [structure.unflatten(layer) for layer in zip(*map(jnp.unstack, leaves), strict=True)]
    return params | {LAYERS: jax.lax.optimization_barrier([_turned(layer) for layer in layers])}


def _turned(layer: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.T if leaf.ndim == 2 else leaf, layer)


def _logits(model: nn.Module, params: Params, inputs: Inputs, cache: Cache) -> tuple[Array, Cache]:
    """params: as of `apart`."""
    if model.program.depth == "scan":
        return _of_last(model, params, inputs, cache)
    layers = jax.tree.map(lambda *rows: jnp.stack(rows), *map(_turned, params[LAYERS]))
    few = inputs["tokens"].size < FEW_ROWS
    with turned_weights() if few else contextlib.nullcontext():
        logits, cache = _of_last(model, params | {LAYERS: layers}, inputs, cache)
    return logits, cache._replace(keys=jnp.unstack(cache.keys), values=jnp.unstack(cache.values))


def _of_last(model: nn.Module, params: Params, inputs: Inputs, cache: Cache) -> tuple[Array, Cache]:
    hidden, cache = model.apply({"params": params}, inputs, cache, method="extend")
    return model.apply({"params": params}, hidden[:, -1:], method="token_logits"), cache
