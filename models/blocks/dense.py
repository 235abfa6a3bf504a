"""Dense layers and activations."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.blocks.products import (
    contraction,
    product,
)
from models.core.program import kept


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """x times the standard normal distribution function (Hendrycks & Gimpel 2016), computed in float32."""
    return _gelu_and_slope(x)[0]


def _gelu_and_slope(x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.float32)
    below = 0.5 * (1.0 + jax.lax.erf(wide * 0.5**0.5))
    slope = below + wide * jnp.exp(-0.5 * jnp.square(wide)) * (2.0 * math.pi) ** -0.5
    return (wide * below).astype(x.dtype), slope.astype(x.dtype)


# The derivative shares its work with the value, so both are kept: the backward pass is one multiplication.
gelu.defvjp(lambda x: tuple(map(kept, _gelu_and_slope(x))), lambda slope, g: (g * slope,))

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(kept(x), approximate=True),
    "relu": lambda x: jax.nn.relu(kept(x)),
}


class Dense(nn.Module):
    """x [..., in] -> x @ kernel + bias [..., features]; kernel f32[in, features], bias f32[features]."""

    features: int
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel, bias = self.parameters(x.shape[-1])
        return _add_bias(product(x.astype(self.dtype), kernel), bias)

    def parameters(self, inputs: int) -> tuple[Array, Array]:
        """Kernel and bias, float32 both."""
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), (inputs, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return kernel, bias

    def contraction(self, equation: str, x: Array, kernel: Array) -> Array:
        """`contraction` in `dtype`."""
        return contraction(equation, x.astype(self.dtype), kernel).astype(self.dtype)


class Weights(Dense):
    """A dense layer's kernel and bias themselves, to be used together with those of others."""

    @nn.compact
    def __call__(self, inputs: int) -> tuple[Array, Array]:
        return self.parameters(inputs)


class ToHeads(Dense):
    """x [batch, length, in] -> x @ kernel + bias as [batch, heads, length, head_dim]: the form of attention kernels.

    XLA:TPU writes a product in this form at no cost; a transposition after it is a copy. Likewise in `FromHeads`.
    """

    heads: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel, bias = self.parameters(x.shape[-1])
        cut = lambda array: array.reshape(*array.shape[:-1], self.heads, -1)
        return _add_bias(self.contraction("blw,whd->bhld", x, cut(kernel)), cut(bias)[:, None, :])


class FromHeads(Dense):
    """x [batch, heads, length, head_dim] -> [batch, length, heads * head_dim] @ kernel + bias."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        heads, head_dim = x.shape[1], x.shape[3]
        kernel, bias = self.parameters(heads * head_dim)
        return _add_bias(self.contraction("bhld,hdw->blw", x, kernel.reshape(heads, head_dim, -1)), bias)


def _add_bias(y: Array, bias: Array) -> Array:
    """In float32, so that the bias's gradient, a sum over all rows, is too."""
    return (y.astype(jnp.float32) + bias).astype(y.dtype)


class Projection(nn.Module):
    """x [..., in] -> x @ kernel [..., features]; kernel f32[in, features]."""

    features: int
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), (x.shape[-1], self.features))
        return product(x.astype(self.dtype), kernel)
