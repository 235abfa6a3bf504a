"""Operations of Pallas kernels whose heads lie side by side in lanes."""

import jax
import jax.numpy as jnp
from jax import Array

HIDDEN = float(jnp.finfo(jnp.float32).min)  # the score of a key that a query does not see


def only(x: Array, head: int, head_dim: int) -> Array:
    """Set the other heads' lanes of x [n, lanes] to 0, so that a product over all lanes is one head's."""
    lane, first = iota(x.shape, 1), head * head_dim
    return jnp.where((lane >= first) & (lane < first + head_dim), x, jnp.zeros_like(x))


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """Return i32[shape], the index along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def along(x: Array, y: Array) -> Array:
    """x [m, n] @ y [n, p] -> f32[m, p]"""
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def across(x: Array, y: Array) -> Array:
    """x [m, n] @ y [p, n].T -> f32[m, p]"""
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
