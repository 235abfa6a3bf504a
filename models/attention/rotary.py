"""Rotary positions (Su et al. 2021, arXiv:2104.09864, equation 34): queries and keys are turned by angles that grow
with their position, so that a score depends on the distance alone.

As in Hugging Face, the pairs of numbers that turn together are the halves of a head: number i and number i + head_dim /
2.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.operands import LANES


class Turns(NamedTuple):
    """The rotation of each token: f32[batch or 1, n, head_dim] each; the first half of the sines is negative."""

    cosines: Array
    sines: Array


def turns_of(positions: Array, head_dim: int, base: float) -> Turns:
    """Return the rotations of tokens at positions i32[batch or 1, n]; pair i turns by base ** (-2i / head_dim) for each
    position."""
    speeds = 1.0 / np.float32(base) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    angles = positions[..., None].astype(jnp.float32) * speeds
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    return Turns(jnp.concatenate([cosines, cosines], -1), jnp.concatenate([-sines, sines], -1))


def turns_at(turns: Turns, slots: Array) -> Turns:
    """Return the rotations of the tokens at slots i32[batch, n], of those [1, length, head_dim] of a row's tokens."""
    return Turns(*(jnp.take(array[0], slots, axis=0, mode="clip") for array in turns))


def turned(x: Array, turns: Turns, head_dim: int | None = None) -> Array:
    """Rotate x [..., width], in whose last axis one head lies, or several side by side -> like x.
    turns: arrays that broadcast to x; of one head they serve all.   head_dim: by default that of the turns."""
    cosines, sines = (jnp.tile(array, x.shape[-1] // array.shape[-1]) for array in turns)
    return _turned(x, cosines, sines, head_dim or turns.cosines.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _turned(x: Array, cosines: Array, sines: Array, head_dim: int) -> Array:
    other = _exchanged(x, head_dim).astype(jnp.float32)
    return (x.astype(jnp.float32) * cosines + other * sines).astype(x.dtype)


def _forward(x, cosines, sines, head_dim):
    return _turned(x, cosines, sines, head_dim), (cosines, sines)


def _backward(head_dim, turns, gradient):
    cosines, sines = turns
    return _turned(gradient, cosines, -sines, head_dim), None, None  # turned back


_turned.defvjp(_forward, _backward)


def _exchanged(x: Array, head_dim: int) -> Array:
    """Exchange the halves of each head. XLA:TPU moves lanes slowly; in bfloat16 a product with ones and zeros, which is
    exact, does it on the matrix unit."""
    half, width = head_dim // 2, x.shape[-1]
    if x.dtype == jnp.bfloat16 and width % LANES == 0 and LANES % head_dim == 0:
        places = np.arange(LANES)
        swap = jnp.asarray(places[:, None] == places // head_dim * head_dim + (places + half) % head_dim, x.dtype)
        blocks = x.reshape(*x.shape[:-1], width // LANES, LANES)
        return jnp.einsum("...l,lm->...m", blocks, swap).reshape(x.shape)
    if width == head_dim:
        return jnp.roll(x, half, -1)
    is_first = jnp.arange(width) % head_dim < half
    return jnp.where(is_first, jnp.roll(x, -half, -1), jnp.roll(x, half, -1))
