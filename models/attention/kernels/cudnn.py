"""cuDNN's fused attention (GPU).

It has no dropout, because JAX offers none. XLA's call has dropout, but with a compiled-in seed and an offset that every
call in the process increments. Its noise would not be a function of (seed, step, row); and since the backward pass
loops over layers in reverse, it would not even see the noise of the forward pass.
"""

import jax
from jax import Array

from models.attention.kernels.kernel import Attention, Kernel, of_bias, of_cut, of_dropout, of_heads, of_length
from models.attention.layouts import HEADS_APART, Mixing
from models.attention.mask import Mask, only_of_seen, visible
from models.core.parameters import Noise


def cudnn(q: Array, k: Array, v: Array, mask: Mask, *, dropout_rate: float = 0.0, noise: Noise = None) -> Array:
    """Compute `plain.attention` of bfloat16 q, k, v without dropout (`_obstacles` refuses it).
    cuDNN takes dense masks only, but skips the blocks that a causal mask hides."""
    seen = visible(mask)
    mixed = jax.nn.dot_product_attention(q, k, v, mask=seen, is_causal=mask.causal, implementation="cudnn")
    return only_of_seen(mixed, seen) if mask.blind else mixed


def _obstacles(attention: Attention) -> list[str]:
    head_dim = attention.width // attention.heads
    obstacles = of_bias(attention) + of_dropout(attention) + of_length(attention)
    if head_dim % 8 or head_dim > 128:
        obstacles.append(f"{of_heads(attention)} have {head_dim} numbers each: choose a multiple of 8 up to 128")
    return obstacles + of_cut(attention)


KERNEL = Kernel("cudnn", "self", ("gpu",), _obstacles, lambda attention: Mixing(HEADS_APART, cudnn))
