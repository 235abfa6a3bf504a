"""Attention with relative positions and a memory (Dai et al. 2019, arXiv:1901.02860, section 3), and the blocks around
it that Transformer-XL and XLNet share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.bert import SIZES, check_encoder, site
from models.layers import ACTIVATIONS, Dense, Norm, product
from models.noise import dropout
from models.parameters import Keys
from models.program import kept
from models.sharding import constrain


class Memory(NamedTuple):
    """What a model remembers of the rows' earlier tokens.

    hidden: [depth, batch, memory, width], the input of each layer, oldest first, in the program's dtype.
    segments: i32[batch, memory] of those tokens, 0 where there is none yet.
    """

    hidden: Array
    segments: Array


def empty_memory(depth: int, batch: int, length: int, width: int, dtype) -> Memory:
    """A memory of nothing."""
    return Memory(jnp.zeros((depth, batch, length, width), dtype), jnp.zeros((batch, length), jnp.int32))


def remember(memory: Array, new: Array) -> Array:
    """The latest of memory [batch, memory, ...] followed by new [batch, length, ...], as many as memory holds."""
    both = jnp.concatenate([memory, new.astype(memory.dtype)], axis=1)
    return jax.lax.stop_gradient(both[:, both.shape[1] - memory.shape[1] :])


def sinusoids(first: int, last: int, width: int) -> np.ndarray:
    """f32[first - last + 1, width]: the encodings of the distances first, first - 1, ..., last; sines, then cosines."""
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(first, last - 1, -1)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


def distance_table(table: np.ndarray, rate: float, keys: Keys) -> Array:
    """A table [distances, width] after dropout, for each row its own: f32[batch or 1, distances, width]."""
    rows = 1 if keys is None or rate == 0.0 else keys.shape[0]
    return dropout(jnp.broadcast_to(table, (rows, *table.shape)), rate, keys)


def shift(scores: Array, keys: int) -> Array:
    """Scores by distance [..., length, distances] -> by key [..., length, keys].

    distances > keys; query i of `length` finds its key j at the distance number j + length - 1 - i.
    """
    *leading, length, distances = scores.shape
    # Row after row, one step to the next query is one place less than a row: cut into rows of that size.
    flat = scores.reshape(*leading, length * distances)[..., length - 1 : length * distances - 1]
    return flat.reshape(*leading, length, distances - 1)[..., :keys]


def shift_to(positions: Array, length: int, scores: Array, keys: int) -> Array:
    """`shift` for queries at chosen positions i32[batch, n] of the length: scores [batch, heads, n, distances].

    A gather: shifting by powers of two, which needs none, took 2 to 9 times as long on a CPU.
    """
    numbers = (length - 1 - positions)[:, None, :, None] + jnp.arange(keys)
    return jnp.take_along_axis(scores, numbers, axis=-1, mode="clip")


def visibility(ranks: Array, thresholds: Array, queries: Array, segments: Array, memory: Array) -> Array:
    """Which keys each query sees: bool[batch, n, memory + length].

    ranks, segments: i32[batch, length] of the keys.   thresholds, queries: i32[batch, n], the queries' thresholds and
    segments.   memory: i32[batch, memory], its segments.   A query sees the keys of its segment in the memory, and
    those in the row whose rank is below its threshold.
    """
    reached = ranks[:, None, :] < thresholds[:, :, None]
    reached = jnp.pad(reached, ((0, 0), (0, 0), (memory.shape[1], 0)), constant_values=True)
    keys = jnp.concatenate([memory, segments], axis=1)
    return reached & (keys[:, None, :] == queries[:, :, None])


class Context(NamedTuple):
    """What queries attend to: k, v [batch, memory + length, heads, head_dim], r [batch or 1, distances, heads,
    head_dim], the keys of the distances."""

    k: Array
    v: Array
    r: Array


class Biases(NamedTuple):
    """What is added to a query for each kind of score, [heads * head_dim] each: u and v of Dai et al. 2019; for types
    (Yang et al. 2019, section 2.5) also `type`, and `types` [2, heads * head_dim], the keys of 'same' and 'other'."""

    content: Array
    position: Array
    type: Array | None = None
    types: Array | None = None


class Queries(NamedTuple):
    """How queries [batch, n, ...] stand to their keys.

    visible: bool[batch, n, memory + length].   by_key: scores by distance -> by key, like `shift`.
    other: bool[batch, n, memory + length], whether the key is of another type; needs the biases of types.
    rows: the name of the axis n for the mesh, None where it is not the whole length.
    """

    visible: Array
    by_key: Callable[[Array], Array]
    other: Array | None = None
    rows: str | None = "length"


def relative_attention(
    q: Array, context: Context, biases: Biases, queries: Queries, *, dropout_rate: float, keys: Keys
) -> Array:
    """Attention by content and by distance (Dai et al. 2019, section 3.3, terms a to d) -> like q.

    q: [batch, n, heads, head_dim], any float dtype; softmax in float32. A query that sees nothing gets zeros.
    dropout_rate: on the probabilities, drawn from `keys` (u32[batch, 2] or None).
    """
    visible, by_key, other, rows = queries
    add = lambda bias: constrain((q + bias.reshape(q.shape[2:])) * scale, "batch", rows, "heads", None)
    scale = q.shape[-1] ** -0.5
    # Each device's queries see all keys of their rows: with a cut length, that gathers keys and values.
    k, v = (constrain(x, "batch", None, "heads", None) for x in context[:2])
    product32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product32("bqhd,bkhd->bhqk", add(biases.content), k)
    if context.r.shape[0] == 1:
        distances = product32("bqhd,rhd->bhqr", add(biases.position), context.r[0])
    else:
        distances = product32("bqhd,brhd->bhqr", add(biases.position), context.r)
    scores += by_key(distances)
    if other is not None:
        types = biases.types.reshape(2, *q.shape[2:])
        same, different = jnp.moveaxis(product32("bqhd,thd->bhqt", add(biases.type), types), -1, 0)
        scores += jnp.where(other[:, None], different[..., None], same[..., None])
    scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    probabilities = dropout(probabilities, dropout_rate, keys)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)
    # Of no visible key the softmax makes equal shares of all, which would tell a prediction its own token.
    mixed = jnp.where(visible.any(axis=-1)[..., None, None], mixed, 0)
    return constrain(mixed, "batch", rows, "heads", None)


class Projection(nn.Module):
    """x [..., in] -> x @ kernel [..., features]; kernel f32[in, features]."""

    features: int
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), (x.shape[-1], self.features))
        return product(x.astype(self.dtype), kernel.astype(self.dtype))


class RelativeAttention(nn.Module):
    """Multi-head relative attention with its residual and norm; the config's fields are those of its family."""

    config: Any
    dtype: jnp.dtype

    def setup(self):
        config = self.config
        project = lambda: Projection(config.width, config.init_std, self.dtype)
        self.query, self.key, self.value, self.position, self.output = (project() for _ in range(5))
        self.norm = Norm(config.norm_epsilon, self.dtype)

    def context(self, hidden: Array, table: Array) -> Context:
        """hidden [batch, memory + length, width] and a table of distances [batch or 1, distances, width]."""
        return Context(*map(self._split, (self.key(hidden), self.value(hidden), self.position(table))))

    def __call__(self, x: Array, context: Context, biases: Biases, queries: Queries, keys: Keys) -> Array:
        """x [batch, n, width] -> norm(x + dropout(output(attend(x)))); see `relative_attention`."""
        config = self.config
        cast = Biases(*(bias if bias is None else bias.astype(self.dtype) for bias in biases))
        q, rate = self._split(self.query(x)), config.attention_dropout
        mixed = relative_attention(q, context, cast, queries, dropout_rate=rate, keys=site(keys, 1))
        y = self.output(kept(mixed.reshape(x.shape)))
        return constrain(self.norm(x + dropout(y, config.dropout, site(keys, 2))), "batch", queries.rows, None)

    def _split(self, x: Array) -> Array:
        return kept(x.reshape(*x.shape[:2], self.config.heads, -1))


class FeedForward(nn.Module):
    """Position-wise block with its residual and norm: x -> norm(x + dropout(down(dropout(activation(up(x)))))).

    rows: the name of x's second axis for the mesh.
    """

    config: Any
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, keys: Keys, rows: str | None = "length") -> Array:
        config = self.config
        y = Dense(config.feed_forward, config.init_std, self.dtype, name="up")(x)
        y = ACTIVATIONS[config.activation](constrain(y, "batch", rows, "feed_forward"))
        y = Dense(x.shape[-1], config.init_std, self.dtype, name="down")(dropout(y, config.dropout, site(keys, 3)))
        y = Norm(config.norm_epsilon, self.dtype, name="norm")(x + dropout(y, config.dropout, site(keys, 4)))
        return constrain(y, "batch", rows, None)


def check_relative(config) -> None:
    """The checks that the configs of this shape share; ValueError names the field."""
    check_encoder(config, SIZES)
    if config.width % 2:
        raise ValueError(f"model.width={config.width}: must be even, for sines and cosines")
    if config.memory < 0:
        raise ValueError(f"model.memory={config.memory}: must be at least 0")


def projection_flops(width: int, feed_forward: int, queries: int, keys: int, distances: int) -> float:
    """Forward FLOPs of one layer's products with weights: q and output, k and v, the distances' keys, feed-forward."""
    return 2.0 * width * (width * (2 * queries + 2 * keys + distances) + 2 * feed_forward * queries)


def attention_flops(width: int, queries: int, keys: int, distances: int) -> float:
    """Forward FLOPs of one layer's scores by content and by distance, and of the mixing of values."""
    return 2.0 * width * queries * (2 * keys + distances)
