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
    """x [..., in] -> x @ kernel + bias [..., features] in a dtype; held: as of `product`."""
    return add_bias(product(x.astype(dtype), weights.kernel, held), weights.bias)


class Weights(nn.Module):
    """A dense layer's parameters for this many inputs themselves, to be used together with those of others.

    init_std: None for inputs ** -0.5 (LeCun et al. 1998, section 4.6).   init_factor: of that at the start.
    """

    features: int
    init_std: float | None
    bias: bool = True
    init_factor: float | None = None

    @nn.compact
    def __call__(self, inputs: int) -> Affine:
        return _parameters(self, inputs, self.init_factor)


class Dense(nn.Module):
    """`affine` with parameters of its own."""

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
    """In float32, so that the bias's gradient, a sum over all rows, is too."""
    if bias is None:
        return y
    return (y.astype(jnp.float32) + per_row(bias, y)).astype(y.dtype)
