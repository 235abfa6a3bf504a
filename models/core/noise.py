"""Device noise as a counter hash: dropout masks and Gumbel noise keyed by (seed, step, row of the global batch, site).

Every number is a function of its row's key and its index inside the row, so the noise does not depend on microbatches,
mesh, device count or platform. `jax.random` cannot promise that cheaply: threefry takes twenty rounds where this hash
takes two, and vmapped `rbg` keys draw other numbers than single keys.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from models.core.parameters import Noise

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio; odd, so its multiples run through all of 2**32
_M1, _M2 = 0x7FEB352D, 0x846CA68B  # the 'lowbias32' multipliers of C. Wellons' hash prospector (2018)
COUNTED = 2**32  # how many elements of a row `spread` can tell apart


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(_M1)
    x = (x ^ (x >> 15)) * jnp.uint32(_M2)
    return x ^ (x >> 16)


def fold(keys: Array, tag: Array | int) -> Array:
    """Derive keys for one use: u32[..., 2] and an integer (or integers that broadcast with [...]) -> u32[..., 2]."""
    tag = jnp.asarray(tag).astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    first = _mix(keys[..., 0] ^ _mix(tag + jnp.uint32(1)))
    second = _mix(keys[..., 1] + tag ^ first)
    return jnp.stack([first, second], axis=-1)


def row_keys(seed: Array | int, step: Array | int, rows: Array) -> Array:
    """Return one key per row of the global batch: rows i32[batch] -> u32[batch, 2]."""
    seeds = jnp.full((rows.shape[0], 2), seed, jnp.uint32)
    return fold(fold(seeds, step), rows)


def bits(keys: Array, shape: tuple[int, ...]) -> Array:
    """Return 32 random bits per element: keys u32[batch, 2] -> u32[batch, *shape].
    A row of more than COUNTED elements is cut along its first axes into slices, each with its own key."""
    cut = _slices(shape)
    leading, counted = shape[:cut], shape[cut:]
    index = jnp.zeros(counted, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(counted))):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, counted, axis) * jnp.uint32(stride % 2**32)
        stride *= counted[axis]
    if leading:
        keys = jax.vmap(fold, (None, 0), 1)(keys, jnp.arange(math.prod(leading)))  # [batch, slices, 2]
    word = lambda number: keys[..., number].reshape(-1, *leading, *(1,) * len(counted))
    return hashed(spread(index) + word(0), word(1))


def bits_at(keys: Array, shape: tuple[int, ...], at: Sequence[Array]) -> Array:
    """Return `bits` of only the elements at `at`, an index i32[batch or 1, ...] for each axis of shape.
    Indices are multiplied before they are broadcast together, which leaves one sum for each element."""
    cut = _slices(shape)
    keys = keys.reshape(-1, *(1,) * (at[0].ndim - 1), 2)
    number = sum(index * math.prod(shape[axis + 1 : cut]) for axis, index in enumerate(at[:cut]))
    if cut:
        keys = fold(keys, number)
    begin = keys[..., 0]
    for axis, index in enumerate(at[cut:], cut):
        begin = begin + spread(index.astype(jnp.uint32) * jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32))
    return hashed(begin, keys[..., 1])


def _slices(shape: tuple[int, ...]) -> int:
    """Return how many leading axes cut a row of this shape into slices of at most COUNTED elements."""
    return next(axis for axis in range(len(shape) + 1) if math.prod(shape[axis:]) <= COUNTED)


def spread(index: Array) -> Array:
    """Turn elements' indices in their row, u32[...], into inputs of `hashed`; the key's first word is still to add."""
    return index * jnp.uint32(_GOLDEN)


def hashed(x: Array, second: Array) -> Array:
    """Return 32 random bits for each element of x u32[...], from `spread` plus the first word of the row's key.
    second: the key's second word."""
    x = (x ^ (x >> 16)) * jnp.uint32(_M1)
    x = x ^ second  # between the rounds: otherwise keys with nearby first words would share shifted streams
    x = (x ^ (x >> 15)) * jnp.uint32(_M2)
    return x ^ (x >> 16)


def ahead(keys: Array, number: Array | int) -> Array:
    """Return keys whose noise is that of keys u32[batch, 2] from element `number` on, in rows of at most COUNTED."""
    return keys.at[:, 0].add(spread(jnp.asarray(number).astype(jnp.uint32)))


def stays(bits: Array, rate: float) -> Array:
    """Return whether dropout at this rate keeps the elements with these bits."""
    return bits >= jnp.uint32(round(rate * 2**32))


def site(keys: Noise, tag: int) -> Noise:
    """Return the keys for one place in the model that draws noise; None without noise."""
    return None if keys is None else fold(keys, tag)


def dropout(x: Array, rate: float, keys: Array | None) -> Array:
    """Zero a share `rate` of x [batch, ...] and scale the rest by 1 / (1 - rate); without keys, x itself."""
    if keys is None or rate == 0.0:
        return x
    return jnp.where(stays(bits(keys, x.shape[1:]), rate), x * (1.0 / (1.0 - rate)), 0).astype(x.dtype)


def gumbel(keys: Array, shape: tuple[int, ...]) -> Array:
    """Return standard Gumbel noise f32[batch, *shape]; argmax(logits + noise) samples softmax(logits)."""
    # Midpoints of 2**23 intervals of (0, 1). With 2**24 the last midpoint would round to 1, whose noise is infinite.
    uniform = (bits(keys, shape) >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24
    return -jnp.log(-jnp.log(uniform))
