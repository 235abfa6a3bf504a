"""Biases of scores by how far away a key is (Raffel et al. 2020, arXiv:1910.10683, section 2.1): a number for each head
and bucket of distances, alike in all layers of a stack."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Buckets(NamedTuple):
    """number: how many.   furthest: the distance from which on all share the last one.   ahead: whether keys after the
    query have half of them, else they share that of the query itself."""

    number: int
    furthest: int
    ahead: bool


def bucket_of(distances: np.ndarray, buckets: Buckets) -> np.ndarray:
    """The buckets i32[n] of a key's place minus the query's, i32[n]: one of each near distance, then wider ones."""
    number, first = buckets.number, 0
    away = np.maximum(-distances, 0)
    if buckets.ahead:
        number //= 2
        first, away = np.where(distances > 0, number, 0), np.abs(distances)
    near = number // 2
    # In float32 and in this order, as the published checkpoints were trained: borders depend on the rounding.
    logs = np.log(np.maximum(away, 1).astype(np.float32) / near) / np.float32(np.log(buckets.furthest / near))
    far = np.minimum(near + (logs * (number - near)).astype(np.int32), number - 1)
    return first + np.where(away < near, away, far)


def _by_distance(table: Array, first: int, last: int, buckets: Buckets) -> Array:
    """Biases f32[heads, distances] of first .. last.   table: f32[buckets, heads]."""
    chosen = np.eye(buckets.number, dtype=np.float32)[bucket_of(np.arange(first, last + 1), buckets)]
    return jnp.einsum("db,bh->hd", chosen, table, precision="highest")


def row_bias(table: Array, queries: int, keys: int, buckets: Buckets) -> Array:
    """What is added to scores of queries and keys from the beginning of rows: f32[heads, queries + keys - 1], as
    `Mask.distances`."""
    return _by_distance(table, 1 - queries, keys - 1, buckets)


def by_key(biases: Array, keys: int) -> Array:
    """Of biases by distance f32[heads, queries + keys - 1], as `Mask.distances`, those of each query and key:
    f32[1, heads, queries, keys]."""
    heads, distances = biases.shape
    spread = jnp.broadcast_to(jnp.pad(biases, ((0, 0), (0, 1)))[:, None], (heads, distances + 1 - keys, distances + 1))
    return shift(spread, keys)[None]


def shift(scores: Array, keys: int) -> Array:
    """Scores by distance [..., length, distances] -> by key [..., length, keys].

    distances > keys; query i of `length` finds its key j at the distance number j + length - 1 - i.
    """
    *leading, length, distances = scores.shape
    # Row after row, one step to the next query is one place less than a row: cut into rows of that size.
    flat = scores.reshape(*leading, length * distances)[..., length - 1 : length * distances - 1]
    return flat.reshape(*leading, length, distances - 1)[..., :keys]


def next_bias(table: Array, queries: int, places: int, filled: Array, buckets: Buckets) -> Array:
    """What is added to scores of queries that stand after the first `filled` i32[] of all `places` of the keys:
    f32[1, heads, queries, places]."""
    biases = _by_distance(table, 1 - places, places - 1, buckets)
    begins = places - 1 - filled - jnp.arange(queries)
    rows = jax.vmap(lambda begin: jax.lax.dynamic_slice_in_dim(biases, begin, places, axis=1), out_axes=1)(begins)
    return rows[None]
