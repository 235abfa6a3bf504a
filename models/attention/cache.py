"""What a causal model keeps of the tokens that it has read, so that the next one costs one token's work."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.mask import Mask, visible
from models.attention.operands import SelfWeights
from models.blocks.dense import affine
from models.blocks.layer import LayerSizes
from models.core.program import Program
from models.core.sharding import constrain


class Cache(NamedTuple):
    """Keys and values of earlier tokens.

    keys, values: [depth, batch, places, heads, head_dim], in the program's dtype.
    segments: i32[batch, places], those of the tokens there; 0 where there is padding or nothing yet.
    filled: i32[], how many places the tokens read so far have taken, alike in all rows.
    """

    keys: Array
    values: Array
    segments: Array
    filled: Array


def empty_cache(depth: int, batch: int, places: int, sizes: LayerSizes, dtype) -> Cache:
    """A cache of nothing, with room for so many tokens in each row."""
    shape = (depth, batch, places, sizes.heads, sizes.width // sizes.heads)
    nothing = constrain(jnp.zeros(shape, dtype), None, "batch", None, "heads", None)
    return Cache(nothing, nothing, jnp.zeros((batch, places), jnp.int32), jnp.zeros((), jnp.int32))


def extended(cache: Cache, keys: Array, values: Array, segments: Array) -> Cache:
    """The cache with n more tokens: keys, values [depth, batch, n, heads, head_dim], segments i32[batch, n]."""
    put = lambda whole, new, axis: jax.lax.dynamic_update_slice_in_dim(
        whole, new.astype(whole.dtype), cache.filled, axis
    )
    kept = put(cache.keys, keys, 2), put(cache.values, values, 2), put(cache.segments, segments, 1)
    return Cache(*kept, cache.filled + segments.shape[1])


def of_rows(cache: Cache, rows: Array) -> Cache:
    """A cache of some rows, i32[n], of another's."""
    of_layers = lambda array: jnp.take(array, rows, axis=1)
    return Cache(of_layers(cache.keys), of_layers(cache.values), cache.segments[rows], cache.filled)


def attend(
    x: Array, weights: SelfWeights, mask: Mask, sizes: LayerSizes, program: Program, own: tuple[Array, Array]
) -> tuple[Array, tuple[Array, Array]]:
    """`plain.attend` without dropout for tokens x [batch, n, width] after those of a layer's slice of a cache.

    own: keys and values [batch, places, heads, head_dim].   mask: of the places, then of x; see `remembering`.
    -> (like x, the keys and values of x, [batch, n, heads, head_dim] each).
    """
    project = lambda name: affine(x, getattr(weights, name), program.compute).reshape(*x.shape[:2], sizes.heads, -1)
    q, k, v = (constrain(project(name), "batch", None, "heads", None) for name in ("query", "key", "value"))
    earlier_keys, earlier_values = own
    # Scores are joined, not keys: a copy of the cache for every token would cost more than the token.
    scores = lambda keys: jnp.einsum(
        "bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, keys, preferred_element_type=jnp.float32
    )
    joined = jnp.concatenate([scores(earlier_keys), scores(k)], axis=-1)
    probabilities = jax.nn.softmax(jnp.where(visible(mask), joined, jnp.finfo(jnp.float32).min), axis=-1).astype(
        v.dtype
    )
    places = earlier_keys.shape[1]
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities[..., :places], earlier_values)
    mixed += jnp.einsum("bhqk,bkhd->bqhd", probabilities[..., places:], v)
    return affine(mixed.reshape(x.shape), weights.output, program.compute), (k, v)
