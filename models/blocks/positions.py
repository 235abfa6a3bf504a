"""Chosen positions of rows."""

import jax
import jax.numpy as jnp
from jax import Array

from models.core.sharding import constrain, current_rules


def gather_positions(x: Array, positions: Array) -> Array:
    """x [batch, length, ...] at positions i32[batch, n] -> [batch, n, ...]."""
    if current_rules() is None:
        return jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(x, positions)
    # A product with ones and zeros takes each device's own rows; a gather sends rows to all devices.
    chosen = (positions[..., None] == jnp.arange(x.shape[1])).astype(x.dtype)
    taken = jnp.einsum("bnl,bl...->bn...", chosen, x, precision="highest")
    return constrain(taken, "batch", *(None,) * (x.ndim - 1))
