"""Biases of scores by how far away a key is (Raffel et al. 2020, arXiv:1910.10683, section 2.1): a number for each head
and bucket of distances, alike in all layers of a stack."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.relative import shift
from models.core.sharding import constrain


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


def row_bias(table: Array, queries: int, keys: int, buckets: Buckets, axis: str | None) -> Array:
    """What is added to scores of queries and keys from the beginning of rows: f32[1, heads, queries, keys].

    axis: of the queries, for the mesh."""
    biases = _by_distance(table, 1 - queries, keys, buckets)
    spread = jnp.broadcast_to(biases[:, None], (biases.shape[0], queries, biases.shape[1]))
    return constrain(shift(spread, keys)[None], None, "heads", axis, None)


def next_bias(table: Array, queries: int, places: int, filled: Array, buckets: Buckets) -> Array:
    """What is added to scores of queries that stand after the first `filled` i32[] of all `places` of the keys:
    f32[1, heads, queries, places]."""
    biases = _by_distance(table, 1 - places, places - 1, buckets)
    begins = places - 1 - filled - jnp.arange(queries)
    rows = jax.vmap(lambda begin: jax.lax.dynamic_slice_in_dim(biases, begin, places, axis=1), out_axes=1)(begins)
    return rows[None]
