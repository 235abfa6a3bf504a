"""Dense layers."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.blocks.products import product
from models.core.parameters import parameter
from models.core.sharding import per_row


class Affine(NamedTuple):
    """A dense layer's parameters: kernel f32[in, features], bias f32[features] or None."""

    kernel: Array
    bias: Array | None


def affine(x: Array, weights: Affine, dtype: jnp.dtype, held: Array | None = None) -> Array:
    """Return x [..., in] @ kernel + bias, [..., features] in a dtype.   held: as in `product`."""
    return add_bias(product(x.astype(dtype), weights.kernel, held), weights.bias)


class Weights(nn.Module):
    """A module that returns a dense layer's parameters, for code that combines them with those of other layers.
    init_std: None for inputs ** -0.5 (LeCun et al. 1998, section 4.6).   init_factor: multiplies it."""

    features: int
    init_std: float | None
    bias: bool = True
    init_factor: float | None = None

    @nn.compact
    def __call__(self, inputs: int) -> Affine:
        return _parameters(self, inputs, self.init_factor)


class Dense(nn.Module):
    """A dense layer: `affine` with its parameters."""

    features: int
    init_std: float | None
    dtype: jnp.dtype
    bias: bool = True

    @nn.compact
    def __call__(self, x: Array, held: Array | None = None) -> Array:
        return affine(x, _parameters(self, x.shape[-1]), self.dtype, held)


def _parameters(module: Dense | Weights, inputs: int, factor: float | None = None) -> Affine:
    std = inputs**-0.5 if module.init_std is None else module.init_std
    init = nn.initializers.normal(std if factor is None else factor * std)
    kernel = parameter(module, "kernel", init, (inputs, module.features))
    return Affine(kernel, parameter(module, "bias", nn.initializers.zeros, (module.features,)) if module.bias else None)


def add_bias(y: Array, bias: Array | None) -> Array:
    """Add the bias in float32, so that its gradient, a sum over all rows, is float32, too."""
    if bias is None:
        return y
    return (y.astype(jnp.float32) + per_row(bias, y)).astype(y.dtype)
