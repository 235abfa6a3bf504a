"""cuDNN's fused attention (GPU)."""

import jax
from jax import Array

from models.attention.mask import Mask, only_of_seen, visible


def cudnn(q: Array, k: Array, v: Array, mask: Mask) -> Array:
    """cuDNN's fused attention (GPU): bfloat16 q, k, v [batch, length, heads, head_dim] -> like q.

    It takes masks densely alone, but skips what a causal one hides.
    """
    seen = visible(mask)
    mixed = jax.nn.dot_product_attention(q, k, v, mask=seen, is_causal=mask.causal, implementation="cudnn")
    return mixed if mask.ranks is None else only_of_seen(mixed, seen)
