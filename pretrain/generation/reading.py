"""What a causal model says of next tokens, with a cache of what it has read."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention.cache import Cache
from models.core.parameters import Params


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
