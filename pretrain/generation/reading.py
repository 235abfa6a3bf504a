"""What a causal model says of next tokens, with a state of what it has read, such as a cache."""

import contextlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention.cache import Cache
from models.blocks.cpu import FEW_ROWS, turned_weights
from models.core.family import Inputs
from models.core.parameters import LAYERS, Params


def read(model: nn.Module, params: Params, tokens: Array, segments: Array, more: int) -> tuple[Array, Any]:
    """Left-padded prompts -> (logits f32[rows, vocab] after each, a state of them with room for `more` tokens).

    params: as of `apart`.
    """
    return _logits(model, params, "begin", of_texts(tokens, segments), more)


def next_logits(model: nn.Module, params: Params, last: Array, lengths: Array, state: Any) -> tuple[Array, Any]:
    """Of one more token i32[rows, 1] in texts of these lengths i32[rows] -> (logits f32[rows, vocab], the state).

    params: as of `apart`.
    """
    if model.program.depth == "unroll" and isinstance(state, Cache):
        state = state._replace(keys=jnp.stack(state.keys), values=jnp.stack(state.values))
    return _logits(model, params, "advance", of_next(last, lengths), state)


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


def _logits(model: nn.Module, params: Params, method: str, inputs: Inputs, before: Any) -> tuple[Array, Any]:
    """params: as of `apart`.   before: what the method takes beside inputs."""
    if model.program.depth == "scan":
        return _of_last(model, params, method, inputs, before)
    layers = jax.tree.map(lambda *rows: jnp.stack(rows), *map(_turned, params[LAYERS]))
    few = inputs["tokens"].size < FEW_ROWS
    with turned_weights() if few else contextlib.nullcontext():
        logits, state = _of_last(model, params | {LAYERS: layers}, method, inputs, before)
    if isinstance(state, Cache):
        state = state._replace(keys=jnp.unstack(state.keys), values=jnp.unstack(state.values))
    return logits, state


def _of_last(model: nn.Module, params: Params, method: str, inputs: Inputs, before: Any) -> tuple[Array, Any]:
    hidden, state = model.apply({"params": params}, inputs, before, method=method)
    return model.apply({"params": params}, hidden[:, -1:], method="token_logits"), state
