"""What a causal model keeps of the tokens that it has read, so that the next one costs one token's work."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.mask import Mask, visible
from models.blocks import cpu
from models.blocks.layer import LayerSizes
from models.core.sharding import constrain


class Cache(NamedTuple):
    """Keys and values of earlier tokens.

    keys, values: [depth, batch, heads, places, head_dim], in the program's dtype; between calls of a model perhaps
    tuples of the layers' own.
    segments: i32[batch, places], those of the tokens there; 0 where there is padding or nothing yet.
    filled: i32[], how many places the tokens read so far have taken, alike in all rows.
    context: the same of a second sequence that the layers see, all of it; None without one. Where it has fewer rows,
    as many rows of the cache, side by side, share each.
    """

    keys: Array
    values: Array
    segments: Array
    filled: Array
    context: "Cache | None" = None


def empty_cache(depth: int, batch: int, places: int, sizes: LayerSizes, dtype) -> Cache:
    """A cache of nothing, with room for so many tokens in each row."""
    shape = (depth, batch, sizes.heads, places, sizes.heads_width // sizes.heads)
    nothing = constrain(jnp.zeros(shape, dtype), None, "batch", "heads", None, None)
    return Cache(nothing, nothing, jnp.zeros((batch, places), jnp.int32), jnp.zeros((), jnp.int32))


def has_room(cache: Cache, tokens: int) -> Array:
    """bool[], whether so many more tokens have places; ValueError where it is known already that they have none."""
    places = cache.segments.shape[1]
    filled = 0 if isinstance(cache.filled, jax.core.Tracer) else int(cache.filled)
    if filled + tokens > places:
        raise ValueError(f"a cache of {places} places has no room for {tokens} tokens after {filled}; make it larger")
    return cache.filled + tokens <= places


def take(cache: Cache, rows: Array) -> Cache:
    """The cache of rows i32[n] of another's, with its context as it is."""
    of_rows = lambda array: jnp.take(array, rows, axis=-4)  # of all layers' array, or of each layer's own
    keys, values = jax.tree.map(of_rows, (cache.keys, cache.values))
    return cache._replace(keys=keys, values=values, segments=cache.segments[rows])


def put(places: Array, new: Array, filled: Array, axis: int) -> Array:
    """What fills an axis of places, with what is new from the first free one on."""
    return jax.lax.dynamic_update_slice_in_dim(places, new.astype(places.dtype), filled, axis)


def _put_token(places: Array, new: Array, filled: Array) -> Array:
    """`put` of one token in one row's [1, heads, places, head_dim]."""
    write = functools.partial(put, axis=2)
    on_cpu = functools.partial(cpu.behind_condition, write)
    return jax.lax.platform_dependent(places, new, filled, cpu=on_cpu, default=write)


def seen(segments: Array, new: Array, filled: Array, bias: Array | None = None) -> Mask:
    """Of tokens of these segments i32[batch, n], which have been put in a cache's i32[batch, places] after `filled`
    others: they see the earlier ones and themselves.   bias: as of `Mask`."""
    at = filled + jnp.arange(new.shape[1])
    ranks, thresholds = jnp.arange(segments.shape[1]), at + 1
    alike = lambda numbers, like: jnp.broadcast_to(numbers, like.shape)
    return Mask(segments, alike(ranks, segments), alike(thresholds, new), queries=new, bias=bias)


def mix(
    q: Array, k: Array, v: Array, mask: Mask, filled: Array, state: tuple[Array, Array]
) -> tuple[Array, tuple[Array, Array]]:
    """`plain.attention` without dropout for q, k, v [batch, n, heads, head_dim] of tokens after the `filled` ones of a
    layer's cache.

    state: its keys and values [batch, heads, places, head_dim].   mask: `seen`.   -> (like q, the state with k and v).
    """
    k, v = map(heads_first, (k, v))
    # Put before they are read: only so does XLA write into the cache that is there, without a copy for every token.
    write = _put_token if (k.shape[0], k.shape[2]) == (1, 1) else functools.partial(put, axis=2)
    keys, values = (write(places, new, filled) for places, new in zip(state, (k, v), strict=True))
    return recall(q, keys, values, mask), (keys, values)


def heads_first(x: Array) -> Array:
    """[batch, n, heads, head_dim] -> [batch, heads, n, head_dim], as a cache has them."""
    return constrain(x.swapaxes(1, 2), "batch", "heads", None, None)


def recall(q: Array, keys: Array, values: Array, mask: Mask) -> Array:
    """What q [batch, n, heads, head_dim] mixes of a layer's keys and values [batch, heads, places, head_dim]."""
    q = heads_first(q)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, keys, preferred_element_type=jnp.float32)
    scores = scores if mask.bias is None else scores + mask.bias
    scores = jnp.where(visible(mask), scores, jnp.finfo(jnp.float32).min)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1).astype(values.dtype), values)
    return mixed.swapaxes(1, 2)
