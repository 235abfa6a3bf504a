"""Attention with structured masks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.kernels import cudnn
from models.noise import dropout
from models.parameters import Keys
from models.sharding import constrain


class Mask(NamedTuple):
    """Which keys a query sees, without a dense [batch, queries, length] array.

    segments: i32[batch, length]; a query sees the keys of its own segment; 0 is padding, seen by no real token.
    queries: i32[batch, queries], the queries' segments where the queries are not the keys' positions.
    """

    segments: Array
    queries: Array | None = None


def attention(
    q: Array, k: Array, v: Array, mask: Mask, *, dropout_rate: float, keys: Keys, kind: str = "xla"
) -> Array:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1) -> [batch, queries, heads, head_dim].

    q: [batch, queries, heads, head_dim], k, v: [batch, length, heads, head_dim], any float dtype; softmax in float32.
    dropout_rate: on the probabilities, drawn from `keys` (u32[batch, 2] or None).
    kind: 'xla', plain operations that run everywhere, or 'cudnn' (GPU), which has no dropout.
    """
    if kind == "cudnn":
        return cudnn(q, k, v, mask.segments)
    queries, rows = (mask.segments, "length") if mask.queries is None else (mask.queries, None)
    q = constrain(q, "batch", rows, "heads", None)
    # Each device's queries see all keys of their rows: with a cut length, that gathers keys and values.
    k, v = (constrain(x, "batch", None, "heads", None) for x in (k, v))
    visible = queries[:, None, :, None] == mask.segments[:, None, None, :]  # [batch, 1, query, key]
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * scale, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    probabilities = dropout(probabilities, dropout_rate, keys)
    return constrain(jnp.einsum("bhqk,bkhd->bqhd", probabilities, v), "batch", rows, "heads", None)
