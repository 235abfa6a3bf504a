"""What Pallas kernels with heads side by side in lanes compute with."""

import jax
import jax.numpy as jnp
from jax import Array


def only(x: Array, head: int, head_dim: int) -> Array:
    """x [n, lanes] with the other heads' lanes 0: a product over all lanes is then one head's."""
    lane, first = iota(x.shape, 1), head * head_dim
    return jnp.where((lane >= first) & (lane < first + head_dim), x, jnp.zeros_like(x))


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """i32[shape], the number along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def along(x: Array, y: Array) -> Array:
    """x [m, n] @ y [n, p] -> f32[m, p]"""
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def across(x: Array, y: Array) -> Array:
    """x [m, n] @ y [p, n].T -> f32[m, p]"""
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
