"""Layer norm, RMS norm, and what stands in their place."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.core.parameters import parameter
from models.core.program import kept
from models.core.sharding import per_row


class Norm(nn.Module):
    """Normalisation over the last axis in float32; returns `dtype`.

    kind: layer (Ba et al. 2016, equation 4), unbiased, the same without bias, rms, without mean and bias (Zhang &
    Sennrich 2019, equation 4), or affine, scale and bias alone (NoNorm, Sun et al. 2020, section 3.3).
    """

    epsilon: float
    dtype: jnp.dtype
    kind: str = "layer"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = parameter(self, "scale", nn.initializers.ones, (x.shape[-1],))
        if self.kind == "rms":
            wide = kept(x).astype(jnp.float32)
            inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
            return (wide * inverse * per_row(scale, x)).astype(self.dtype)
        if self.kind not in ("layer", "unbiased", "affine"):
            raise ValueError(f"norm={self.kind!r}: use layer, unbiased, rms or affine")
        bias = None
        if self.kind != "unbiased":
            bias = per_row(parameter(self, "bias", nn.initializers.zeros, (x.shape[-1],)), x)
        if self.kind == "affine":
            return (kept(x).astype(jnp.float32) * per_row(scale, x) + bias).astype(self.dtype)
        return _normalised(x, per_row(scale, x), bias, self.epsilon, self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalised(x: Array, scale: Array, bias: Array | None, epsilon: float, dtype: jnp.dtype) -> Array:
    return _norm_forward(x, scale, bias, epsilon, dtype)[0]


def _norm_forward(x, scale, bias, epsilon, dtype):
    x = kept(x)
    wide = x.astype(jnp.float32)
    mean = kept(wide.mean(-1, keepdims=True))
    if x.dtype == jnp.bfloat16:  # both sums in one pass; the difference loses fewer digits than x's rounding
        variance = jnp.maximum(jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean), 0.0)
    else:
        variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    inverse = kept(jax.lax.rsqrt(variance + epsilon))
    y = (wide - mean) * inverse * scale
    return (y if bias is None else y + bias).astype(dtype), (x, mean, inverse, scale, bias)


def _norm_backward(epsilon, dtype, residuals, g):
    x, mean, inverse, scale, bias = residuals
    g = g.astype(jnp.float32)
    hat = (x.astype(jnp.float32) - mean) * inverse
    scaled = g * scale
    dx = inverse * (scaled - scaled.mean(-1, keepdims=True) - hat * (scaled * hat).mean(-1, keepdims=True))
    shared = tuple(range(int(scale.ndim > 1), g.ndim - 1))  # all axes but the last and, after `per_row`, the first
    summed = lambda wide: wide.sum(shared).reshape(scale.shape)
    return dx.astype(x.dtype), summed(g * hat), None if bias is None else summed(g)


_normalised.defvjp(_norm_forward, _norm_backward)
