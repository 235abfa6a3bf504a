"""Which keys a query sees, without a dense [batch, queries, keys] array."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Mask(NamedTuple):
    """Which keys a query sees, without a dense [batch, queries, length] array.

    segments: i32[batch, length]; a query sees the keys of its own segment; 0 is padding, seen by no real token.
    queries: i32[batch, queries], the queries' segments where the queries are not the keys' positions.
    """

    segments: Array
    queries: Array | None = None


class Tokens(NamedTuple):
    """What decides which keys a query sees, i32[batch, memory + length] of keys, i32[batch, n] of queries.

    A query sees the keys of its segment whose rank is below its own, its threshold.
    types: for the scores by types; needs their biases.
    """

    ranks: Array
    segments: Array
    types: Array | None = None


class Queries(NamedTuple):
    """How queries [batch, n, ...] stand to their keys, without an array [batch, n, memory + length].

    own, keys: the queries and the keys.   itself: whether queries, the whole row, see themselves whatever their rank.
    starts: i32[batch, n], of chosen queries; each finds key j at the distance number j + start. None: the queries are
    the whole row, and start at length - 1, length - 2, ..., 0.
    """

    own: Tokens
    keys: Tokens
    itself: bool = False
    starts: Array | None = None

    @property
    def axis(self) -> str | None:
        """The name of n for the mesh, None where it is not the whole length."""
        return "length" if self.starts is None else None


def remembered_keys(memory: Array, row: Tokens) -> Tokens:
    """The keys: a memory of these segments, i32[batch, memory], whose types are 0 and ranks below all others, then the
    row's."""
    lowest, types = jnp.iinfo(jnp.int32).min, None if row.types is None else jnp.zeros_like(memory)
    before = Tokens(jnp.full_like(memory, lowest), memory, types)
    return jax.tree.map(lambda *both: jnp.concatenate(both, axis=1), before, row)


def visibility(queries: Queries) -> Array:
    """Which keys each query sees: bool[batch, n, memory + length]."""
    own, keys = queries.own, queries.keys
    reached = keys.ranks[:, None, :] < own.ranks[:, :, None]
    if queries.itself:
        length, total = own.ranks.shape[1], keys.ranks.shape[1]
        reached |= jnp.eye(length, total, k=total - length, dtype=bool)
    return reached & (keys.segments[:, None, :] == own.segments[:, :, None])
