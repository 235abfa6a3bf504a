"""Activations. The forward pass also computes and keeps the derivative, so that the backward pass is one
multiplication."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from models.core.program import kept


def _with_slope(value_and_slope: Callable[[Array], tuple[Array, Array]]) -> Callable[[Array], Array]:
    """Return an activation.   value_and_slope: f32 x -> its value and derivative."""

    def forward(x: Array) -> tuple[Array, Array]:
        value, slope = (y.astype(x.dtype) for y in value_and_slope(x.astype(jnp.float32)))
        return value, kept(slope)

    activation = jax.custom_vjp(lambda x: forward(x)[0])
    activation.defvjp(forward, lambda slope, g: (g * slope,))
    return activation


@_with_slope
def gelu(wide: Array) -> tuple[Array, Array]:
    """x times the standard normal distribution function of x (Hendrycks & Gimpel 2016)."""
    below = 0.5 * (1.0 + jax.lax.erf(wide * 0.5**0.5))
    slope = below + wide * jnp.exp(-0.5 * jnp.square(wide)) * (2.0 * math.pi) ** -0.5
    return wide * below, slope


@_with_slope
def gelu_new(wide: Array) -> tuple[Array, Array]:
    """GPT-2's approximation of `gelu` by a hyperbolic tangent."""
    scale, square = (2.0 / math.pi) ** 0.5, jnp.square(wide)
    tanh = jnp.tanh(scale * wide * (1.0 + 0.044715 * square))
    below, inner = 0.5 * (1.0 + tanh), scale * (1.0 + 3.0 * 0.044715 * square)
    return wide * below, below + 0.5 * wide * (1.0 - jnp.square(tanh)) * inner


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": lambda x: jax.nn.relu(kept(x)),
}
