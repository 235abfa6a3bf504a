"""Attention by plain operations, which run on every platform."""

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.layouts import HEADS_APART, Mixing
from models.attention.mask import Mask, bias_of, only_of_seen, pairs_scope, times, visible
from models.core.noise import dropout
from models.core.parameters import Noise
from models.core.sharding import constrain


def attention(q: Array, k: Array, v: Array, mask: Mask, *, dropout_rate: float, noise: Noise) -> Array:
    """Compute scaled dot-product attention (Vaswani et al. 2017, equation 1) -> [batch, queries, heads, head_dim].
    q: [batch, queries, heads, head_dim], k, v: [batch, length, heads, head_dim], any float dtype; softmax in float32.
    dropout_rate: on the probabilities, drawn from `noise` (u32[batch, 2] or None)."""
    q = constrain(q, "batch", mask.axis, "heads", None)
    # Each device's queries see all keys of their rows; if the mesh cuts rows, this gathers keys and values.
    k, v = (constrain(x, "batch", None, "heads", None) for x in (k, v))
    seen = visible(mask)
    probabilities = shares(q, k, mask, seen).astype(v.dtype)
    probabilities = dropout(probabilities, dropout_rate, noise)
    with jax.named_scope(pairs_scope(mask)):
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)
    if mask.blind:
        mixed = only_of_seen(mixed, seen)
    return constrain(mixed, "batch", mask.axis, "heads", None)


def shares(q: Array, k: Array, mask: Mask, seen: Array) -> Array:
    """Return the attention probabilities f32[batch, heads, queries, keys].   seen: from `visible`."""
    scale = q.shape[-1] ** -0.5
    with jax.named_scope(pairs_scope(mask)):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * scale, k, preferred_element_type=jnp.float32)
    bias = bias_of(mask)
    scores = scores if bias is None else scores + bias
    if mask.blocks is not None:  # a key that is seen twice has twice the weight
        scores += jnp.log(jnp.maximum(times(mask), 1).astype(jnp.float32))
    return jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1)


PLAIN = Mixing(HEADS_APART, attention)
