"""Activations. The forward pass also computes and keeps the derivative, so that the backward pass is one
multiplication."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from models.blocks import cpu
from models.core.program import kept


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """Return x times the standard normal distribution function of x (Hendrycks & Gimpel 2016), computed in float32."""
    return _gelu_and_slope(x)[0]


def _gelu_and_slope(x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.float32)
    below = 0.5 * (1.0 + jax.lax.erf(wide * 0.5**0.5))
    slope = below + wide * jnp.exp(-0.5 * jnp.square(wide)) * (2.0 * math.pi) ** -0.5
    return (wide * below).astype(x.dtype), slope.astype(x.dtype)


def _with_slope(value_and_slope: Callable[[Array], tuple[Array, Array]], x: Array) -> tuple[Array, Array]:
    value, slope = value_and_slope(x)
    return value, kept(slope)


gelu.defvjp(functools.partial(_with_slope, _gelu_and_slope), lambda slope, g: (g * slope,))


@jax.custom_vjp
def gelu_new(x: Array) -> Array:
    """Return GPT-2's approximation of `gelu` by a hyperbolic tangent, computed in float32."""
    return _gelu_new_and_slope(x)[0]


def _gelu_new_and_slope(x: Array) -> tuple[Array, Array]:
    wide, scale = x.astype(jnp.float32), (2.0 / math.pi) ** 0.5
    tanh = lambda wide: jnp.tanh(scale * wide * (1.0 + 0.044715 * jnp.square(wide)))
    value, wide = wide * (0.5 * (1.0 + tanh(wide))), cpu.again(wide)
    below, inner = 0.5 * (1.0 + tanh(wide)), scale * (1.0 + 3.0 * 0.044715 * jnp.square(wide))
    slope = below + 0.5 * wide * (1.0 - jnp.square(tanh(wide))) * inner
    return value.astype(x.dtype), slope.astype(x.dtype)


gelu_new.defvjp(functools.partial(_with_slope, _gelu_new_and_slope), lambda slope, g: (g * slope,))

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": lambda x: jax.nn.relu(kept(x)),
}
