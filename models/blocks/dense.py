"""Dense layers and activations."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.blocks.products import product
from models.core.program import kept
from models.core.sharding import per_row


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """x times the standard normal distribution function (Hendrycks & Gimpel 2016), computed in float32."""
    return _gelu_and_slope(x)[0]


def _gelu_and_slope(x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.float32)
    below = 0.5 * (1.0 + jax.lax.erf(wide * 0.5**0.5))
    slope = below + wide * jnp.exp(-0.5 * jnp.square(wide)) * (2.0 * math.pi) ** -0.5
    return (wide * below).astype(x.dtype), slope.astype(x.dtype)


def _with_slope(of: Callable[[Array], tuple[Array, Array]], x: Array) -> tuple[Array, Array]:
    value, slope = of(x)
    return value, kept(slope)


# The derivative shares its work with the value and is kept: the backward pass is one multiplication. The value is kept
# by who reads it.
gelu.defvjp(functools.partial(_with_slope, _gelu_and_slope), lambda slope, g: (g * slope,))


@jax.custom_vjp
def gelu_new(x: Array) -> Array:
    """GPT-2's approximation of `gelu` by a hyperbolic tangent, computed in float32."""
    return _gelu_new_and_slope(x)[0]


def _gelu_new_and_slope(x: Array) -> tuple[Array, Array]:
    wide, scale = x.astype(jnp.float32), (2.0 / math.pi) ** 0.5
    tanh = lambda wide: jnp.tanh(scale * wide * (1.0 + 0.044715 * jnp.square(wide)))
    value, wide = wide * (0.5 * (1.0 + tanh(wide))), _again(wide)
    below, inner = 0.5 * (1.0 + tanh(wide)), scale * (1.0 + 3.0 * 0.044715 * jnp.square(wide))
    slope = below + 0.5 * wide * (1.0 - jnp.square(tanh(wide))) * inner
    return value.astype(x.dtype), slope.astype(x.dtype)


def _again(x: Array) -> Array:
    """x, which XLA:CPU takes for another array: what follows from it is computed where it is read, in one pass.

    Else it writes what value and slope share for the backward pass, and reads it for the value in a second pass.
    """
    one = jax.lax.platform_dependent(jnp.float32(1), cpu=jax.lax.optimization_barrier, default=lambda one: one)
    return x * one


gelu_new.defvjp(functools.partial(_with_slope, _gelu_new_and_slope), lambda slope, g: (g * slope,))

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": lambda x: jax.nn.relu(kept(x)),
}


class Affine(NamedTuple):
    """A dense layer's parameters: kernel f32[in, features], bias f32[features]."""

    kernel: Array
    bias: Array


def affine(x: Array, weights: Affine, dtype: jnp.dtype, held: Array | None = None) -> Array:
    """x [..., in] -> x @ kernel + bias [..., features] in a dtype; held: as of `product`."""
    return add_bias(product(x.astype(dtype), weights.kernel, held), weights.bias)


class Weights(nn.Module):
    """A dense layer's parameters for this many inputs themselves, to be used together with those of others."""

    features: int
    init_std: float

    @nn.compact
    def __call__(self, inputs: int) -> Affine:
        return _parameters(self, inputs)


class Dense(nn.Module):
    """`affine` with parameters of its own."""

    features: int
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, held: Array | None = None) -> Array:
        return affine(x, _parameters(self, x.shape[-1]), self.dtype, held)


def _parameters(module: Dense | Weights, inputs: int) -> Affine:
    kernel = module.param("kernel", nn.initializers.normal(module.init_std), (inputs, module.features))
    return Affine(kernel, module.param("bias", nn.initializers.zeros, (module.features,)))


def add_bias(y: Array, bias: Array) -> Array:
    """In float32, so that the bias's gradient, a sum over all rows, is too."""
    return (y.astype(jnp.float32) + per_row(bias, y)).astype(y.dtype)


class Projection(nn.Module):
    """x [..., in] -> x @ kernel [..., features]; kernel f32[in, features]."""

    features: int
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), (x.shape[-1], self.features))
        return product(x.astype(self.dtype), kernel)
