"""Attention in plain operations, which run everywhere."""

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.kernels.cudnn import cudnn
from models.attention.mask import Mask, only_of_seen, visible
from models.core.noise import dropout
from models.core.parameters import Noise
from models.core.sharding import constrain


def attention(
    q: Array, k: Array, v: Array, mask: Mask, *, dropout_rate: float, noise: Noise, kind: str = "xla"
) -> Array:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1) -> [batch, queries, heads, head_dim].

    q: [batch, queries, heads, head_dim], k, v: [batch, length, heads, head_dim], any float dtype; softmax in float32.
    dropout_rate: on the probabilities, drawn from `noise` (u32[batch, 2] or None).
    kind: 'xla', plain operations that run everywhere, or 'cudnn' (GPU), which has no dropout.
    """
    if kind == "cudnn":
        return cudnn(q, k, v, mask)
    q = constrain(q, "batch", mask.axis, "heads", None)
    # Each device's queries see all keys of their rows: with a cut length, that gathers keys and values.
    k, v = (constrain(x, "batch", None, "heads", None) for x in (k, v))
    seen = visible(mask)
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * scale, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    probabilities = dropout(probabilities, dropout_rate, noise)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)
    if mask.ranks is not None:  # else every query sees itself
        mixed = only_of_seen(mixed, seen)
    return constrain(mixed, "batch", mask.axis, "heads", None)
