"""Relative position biases of attention scores (Raffel et al. 2020, arXiv:1910.10683, section 2.1): a number for each
head and bucket of distances, shared by all layers of a stack."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.core.noise import dropout
from models.core.parameters import Noise


class Buckets(NamedTuple):
    """number: how many buckets.   furthest: the distance from which on all distances share the last bucket.
    ahead: whether keys after the query have half of the buckets; if not, they share the bucket of distance 0."""

    number: int
    furthest: int
    ahead: bool


def bucket_of(distances: np.ndarray, buckets: Buckets) -> np.ndarray:
    """Return the bucket i32[n] of each distance i32[n] (the key's place minus the query's). Each short distance has a
    bucket of its own; longer distances share ever wider buckets."""
    number, first = buckets.number, 0
    away = np.maximum(-distances, 0)
    if buckets.ahead:
        number //= 2
        first, away = np.where(distances > 0, number, 0), np.abs(distances)
    near = number // 2
    # In float32 and in this order, as the published checkpoints were trained: bucket borders depend on the rounding.
    logs = np.log(np.maximum(away, 1).astype(np.float32) / near) / np.float32(np.log(buckets.furthest / near))
    far = np.minimum(near + (logs * (number - near)).astype(np.int32), number - 1)
    return first + np.where(away < near, away, far)


def distance_table(table: Array | np.ndarray, rate: float, noise: Noise) -> Array:
    """Apply dropout to a table [distances, width], separately for each row: f32[batch or 1, distances, width]."""
    rows = 1 if noise is None or rate == 0.0 else noise.shape[0]
    return dropout(jnp.broadcast_to(table, (rows, *table.shape)), rate, noise)


def _by_distance(table: Array, first: int, last: int, buckets: Buckets) -> Array:
    """Return the biases f32[heads, distances] of the distances first .. last.   table: f32[buckets, heads]."""
    chosen = np.eye(buckets.number, dtype=np.float32)[bucket_of(np.arange(first, last + 1), buckets)]
    return jnp.einsum("db,bh->hd", chosen, table, precision="highest")


def row_bias(table: Array, queries: int, keys: int, buckets: Buckets) -> Array:
    """Return `Mask.distances`, f32[heads, queries + keys - 1], for queries and keys that both begin with the row."""
    return _by_distance(table, 1 - queries, keys - 1, buckets)


def by_key(biases: Array, keys: int) -> Array:
    """Expand biases by distance f32[heads, queries + keys - 1], as in `Mask.distances`, to one for each query and key,
    f32[1, heads, queries, keys]."""
    heads, distances = biases.shape
    spread = jnp.broadcast_to(jnp.pad(biases, ((0, 0), (0, 1)))[:, None], (heads, distances + 1 - keys, distances + 1))
    return shift(spread, keys)[None]


def shift(scores: Array, keys: int) -> Array:
    """Reorder scores by distance [..., length, distances] into scores by key [..., length, keys].
    Requires distances > keys. The score of query i and key j is at index j + length - 1 - i of the distances."""
    *leading, length, distances = scores.shape
    # From one query to the next that index is one smaller. So flatten, drop the start, and cut rows one shorter.
    flat = scores.reshape(*leading, length * distances)[..., length - 1 : length * distances - 1]
    return flat.reshape(*leading, length, distances - 1)[..., :keys]


def next_bias(table: Array, queries: int, places: int, filled: Array, buckets: Buckets) -> Array:
    """Return the biases f32[1, heads, queries, places] of queries that follow the first `filled` i32[] of all `places`
    of the keys."""
    biases = _by_distance(table, 1 - places, places - 1, buckets)
    begins = places - 1 - filled - jnp.arange(queries)
    rows = jax.vmap(lambda begin: jax.lax.dynamic_slice_in_dim(biases, begin, places, axis=1), out_axes=1)(begins)
    return rows[None]
