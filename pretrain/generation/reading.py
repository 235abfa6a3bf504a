"""What a causal model says of next tokens, with a cache of what it has read."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention.cache import Cache
from models.core.family import Inputs
from models.core.parameters import LAYERS, Params


def read(model: nn.Module, params: Params, tokens: Array, segments: Array, more: int) -> tuple[Array, Cache]:
    """Left-padded prompts -> (logits f32[rows, vocab] after each, a cache of them with room for `more` tokens)."""
    rows, places = tokens.shape
    return _logits(model, params, of_texts(tokens, segments), model.empty_cache(rows, places + more))


def next_logits(model: nn.Module, params: Params, last: Array, lengths: Array, cache: Cache) -> tuple[Array, Cache]:
    """Of one more token i32[rows, 1] in texts of these lengths i32[rows] -> (logits f32[rows, vocab], the cache)."""
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
    """Parameters for a loop over tokens: of an unrolled program the layers' in tuples, as a cache is that `read` gives.

    A loop that holds them stacked would cut every layer's out of the stack again for every token, which on a CPU copies
    all weights and the cache; stacked inside it and cut at once, nothing is copied.
    """
    return params | {LAYERS: _apart(model, params[LAYERS])}


def _logits(model: nn.Module, params: Params, inputs: Inputs, cache: Cache) -> tuple[Array, Cache]:
    variables = {"params": params | {LAYERS: _together(params[LAYERS])}}
    cache = cache._replace(keys=_together(cache.keys), values=_together(cache.values))
    hidden, cache = model.apply(variables, inputs, cache, method="extend")
    cache = cache._replace(keys=_apart(model, cache.keys), values=_apart(model, cache.values))
    return model.apply(variables, hidden[:, -1:], method="token_logits"), cache


def _apart(model: nn.Module, tree):
    return tree if model.program.depth == "scan" else jax.tree.map(jnp.unstack, tree)


def _together(tree):
    return jax.tree.map(lambda x: jnp.stack(x) if type(x) is tuple else x, tree, is_leaf=lambda x: type(x) is tuple)
