"""The key-value cache of a causal model, so that the next token costs the work of one token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.mask import Mask, visible
from models.blocks import cpu
from models.blocks.layer import LayerSizes
from models.core.sharding import constrain

KeysValues = tuple[Array, Array]  # a layer's, [batch, heads, places, head_dim] each


class Cache(NamedTuple):
    """Keys and values of earlier tokens.

    keys, values: [depth, batch, heads, places, head_dim], in the program's dtype; between calls of a model they may be
    tuples with one array per layer.
    segments: i32[batch, places], the segment of the token in each place; 0 for padding and for free places.
    filled: i32[], the number of places taken so far, the same in all rows.
    context: the cache of a second sequence (an encoder's output), which layers see as a whole; None without one. If it
    has fewer rows than this cache, each of its rows serves an equal number of adjacent rows here.
    mask: i32[], the token that stands where a token is predicted, of models that need one.
    """

    keys: Array
    values: Array
    segments: Array
    filled: Array
    context: "Cache | None" = None
    mask: Array | None = None


def empty_cache(depth: int, batch: int, places: int, sizes: LayerSizes, dtype) -> Cache:
    """Return an empty cache with room for `places` tokens in each row."""
    shape = (depth, batch, sizes.heads, places, sizes.heads_width // sizes.heads)
    zeros = constrain(jnp.zeros(shape, dtype), None, "batch", "heads", None, None)
    return Cache(zeros, zeros, jnp.zeros((batch, places), jnp.int32), jnp.zeros((), jnp.int32))


def has_room(cache: Cache, tokens: int) -> Array:
    """Return bool[], whether `tokens` more tokens fit. Raises ValueError if tracing already shows that they do not."""
    places = cache.segments.shape[1]
    filled = 0 if isinstance(cache.filled, jax.core.Tracer) else int(cache.filled)
    if filled + tokens > places:
        raise ValueError(f"a cache of {places} places has no room for {tokens} tokens after {filled}; make it larger")
    return cache.filled + tokens <= places


def take(cache: Cache, rows: Array) -> Cache:
    """Return the cache with the given rows, i32[n]; its context is unchanged. With one, each row must replace a row of
    the same text: a text's rows are adjacent, and all texts have equally many."""
    take_rows = lambda array: jnp.take(array, rows, axis=-4)  # from one array of all layers, or one array per layer
    keys, values = jax.tree.map(take_rows, (cache.keys, cache.values))
    return cache._replace(keys=keys, values=values, segments=cache.segments[rows])


def put(places: Array, new: Array, filled: Array, axis: int) -> Array:
    """Write `new` into `places` along an axis, from the first free place, `filled`, on."""
    return jax.lax.dynamic_update_slice_in_dim(places, new.astype(places.dtype), filled, axis)


def _put_token(places: Array, new: Array, filled: Array) -> Array:
    """Do the same as `put` for one token of one row, [1, heads, places, head_dim]."""
    write = functools.partial(put, axis=2)
    on_cpu = functools.partial(cpu.behind_condition, write)
    return jax.lax.platform_dependent(places, new, filled, cpu=on_cpu, default=write)


def seen(segments: Array, new: Array, filled: Array, bias: Array | None = None) -> Mask:
    """Return the mask of new tokens, which see earlier tokens and themselves.

    segments: i32[batch, places], of the cache with the new tokens.   new: i32[batch, n], segments of the new tokens,
    which stand after `filled` others.   bias: as in `Mask`.
    """
    new_places = filled + jnp.arange(new.shape[1])
    ranks, thresholds = jnp.arange(segments.shape[1]), new_places + 1
    spread = lambda numbers, like: jnp.broadcast_to(numbers, like.shape)
    return Mask(segments, spread(ranks, segments), spread(thresholds, new), queries=new, bias=bias)


def mix(q: Array, k: Array, v: Array, mask: Mask, filled: Array, state: KeysValues) -> tuple[Array, KeysValues]:
    """Compute `plain.attention` without dropout for q, k, v [batch, n, heads, head_dim] of tokens that follow the
    `filled` ones in a layer's cache -> (attended, like q; the state with k and v).   mask: from `seen`."""
    k, v = map(heads_first, (k, v))
    # Write before reading: only then does XLA update the cache in place instead of copying it for every token.
    write = _put_token if (k.shape[0], k.shape[2]) == (1, 1) else functools.partial(put, axis=2)
    keys, values = (write(places, new, filled) for places, new in zip(state, (k, v), strict=True))
    return recall(q, keys, values, mask), (keys, values)


def heads_first(x: Array) -> Array:
    """[batch, n, heads, head_dim] -> [batch, heads, n, head_dim], the layout of the cache."""
    return constrain(x.swapaxes(1, 2), "batch", "heads", None, None)


def recall(q: Array, keys: Array, values: Array, mask: Mask) -> Array:
    """Attend from q [batch, n, heads, head_dim] to cached keys and values [batch, heads, places, head_dim]."""
    q = heads_first(q)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, keys, preferred_element_type=jnp.float32)
    scores = scores if mask.bias is None else scores + mask.bias
    scores = jnp.where(visible(mask), scores, jnp.finfo(jnp.float32).min)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1).astype(values.dtype), values)
    return mixed.swapaxes(1, 2)
