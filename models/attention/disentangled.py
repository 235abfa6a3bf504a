"""Disentangled attention (He et al. 2021, arXiv:2006.03654, section 3.1): scores by content, from content to position
and from position to content, with log buckets of distances and shared projections, as in DeBERTa V2 and V3.

The score of query i and key j is (q_i k_j + q_i K_b + k_j Q_b) / sqrt(3 head_dim), where b is the bucket of i - j, and
K and Q are the buckets' embeddings, projected as keys and as queries. Both terms of positions depend on i - j: so rows
are multiplied with a band of distances and shifted, which needs no gather of scores, for a block of queries at a time.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.distances import distance_table, shift
from models.attention.mask import PAIRS, Mask, chosen, visible
from models.blocks.dense import Weights, affine
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.products import shared_product
from models.core.noise import dropout, fold, site
from models.core.parameters import Noise
from models.core.program import Program, kept
from models.core.sharding import constrain

BLOCK = 128  # queries whose scores are in memory at a time
KEPT_BLOCKS = 8  # with more of them, the backward pass computes probabilities again instead of keeping them


class Buckets(NamedTuple):
    """number: of buckets of either sign.   furthest: the distance from which on all distances share the last bucket."""

    number: int
    furthest: int


class Context(NamedTuple):
    """What queries attend to: keys and values of tokens [batch, length, heads, head_dim], and keys and queries of the
    buckets in `reached` [batch or 1, buckets, heads, head_dim]."""

    k: Array
    v: Array
    keys: Array
    queries: Array


def bucket_of(distances: np.ndarray, buckets: Buckets) -> np.ndarray:
    """Return the bucket i32[...] of each distance i32[...] (the query's place minus the key's). Distances of up to half
    of the buckets have one of their own; longer ones share ever wider ones (the authors' code; not in the paper)."""
    middle, away = buckets.number // 2, np.abs(distances)
    # In float32 and in this order, as the published checkpoints were trained: bucket borders depend on the rounding.
    logs = np.log(np.maximum(away, middle).astype(np.float32) / np.float32(middle))
    logs = logs / np.log(np.float32((buckets.furthest - 1) / middle)) * np.float32(middle - 1)
    signed = np.where(away <= middle, distances, np.sign(distances) * (np.ceil(logs).astype(np.int32) + middle))
    return np.clip(signed + buckets.number, 0, 2 * buckets.number - 1).astype(np.int32)


def reached(length: int, buckets: Buckets) -> slice:
    """Return the buckets of all distances in rows of this length."""
    first, last = bucket_of(np.array([1 - length, length - 1]), buckets)
    return slice(int(first), int(last) + 1)


def _places(distances: np.ndarray, length: int, buckets: Buckets) -> np.ndarray:
    """Return the place of each distance's bucket among the `reached` ones, whose ends stand for those beyond."""
    of_row = reached(length, buckets)
    return np.clip(bucket_of(distances, buckets), of_row.start, of_row.stop - 1) - of_row.start


class DisentangledAttention(nn.Module):
    """Multi-head disentangled attention with its residual and norm."""

    sizes: LayerSizes
    buckets: Buckets
    program: Program

    def setup(self):
        sizes = self.sizes
        sizes.check_usual("disentangled attention")
        for name in ("query", "key", "value", "output"):
            setattr(self, name, Weights(sizes.width, sizes.init_std))
        self.norm = Norm(sizes.norm_epsilon, self.program.compute)

    def _split(self, x: Array, weights: Weights) -> Array:
        y = kept(affine(x, weights(self.sizes.width), self.program.compute))
        return y.reshape(*x.shape[:-1], self.sizes.heads, -1)

    def context(self, x: Array, table: Array, noise: Noise) -> Context:
        """Project x [batch, length, width] and the embeddings of buckets f32[2 * buckets, width], after dropout."""
        table = distance_table(table[reached(x.shape[1], self.buckets)], self.sizes.dropout, noise)
        of_tokens = (self._split(x, weights) for weights in (self.key, self.value))
        return Context(*of_tokens, *(self._split(table, weights) for weights in (self.key, self.query)))

    def __call__(self, x: Array, context: Context, mask: Mask, noise: Noise, slots: Array | None = None) -> Array:
        """Return norm(x + dropout(output(attend(x)))) for x [batch, n, width].
        slots: i32[batch, n], the places of x in the row; None if x is the whole row."""
        sizes, dtype = self.sizes, self.program.compute
        q, attend = self._split(x, self.query), attend_row
        if slots is not None:
            attend = functools.partial(attend_chosen, slots=slots)
        mixed = attend(q, context, mask, self.buckets, dropout_rate=sizes.attention_dropout, noise=site(noise, 1))
        y = affine(kept(mixed.reshape(x.shape)), self.output(sizes.width), dtype)
        axis = mask.axis if slots is None else None
        return constrain(self.norm(x + dropout(y, sizes.dropout, site(noise, 2))), "batch", axis, None)


def _scaled(q: Array, context: Context) -> tuple[Array, Context]:
    scale = (3 * q.shape[-1]) ** -0.5
    return q * scale, context._replace(queries=context.queries * scale)


def attend_chosen(
    q: Array, context: Context, mask: Mask, buckets: Buckets, *, slots: Array, dropout_rate: float, noise: Noise
) -> Array:
    """Attend from chosen positions: `attend_row` by its definition, a gather of scores by bucket.
    q: [batch, n, heads, head_dim].   slots: i32[batch, n].   mask: of the whole row."""
    q, (k, v, keys, queries) = _scaled(q, context)
    length = k.shape[1]
    q, k, v = (constrain(x, "batch", None, "heads", None) for x in (q, k, v))
    of_distance = jnp.asarray(_places(np.arange(1 - length, length), length, buckets))
    numbers = of_distance[slots[:, None, :, None] - jnp.arange(length) + length - 1]  # [batch, 1, n, length]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    to_position, to_content = shared_product("bqhd,brhd->bhqr", q, keys), shared_product("bkhd,brhd->bhrk", k, queries)
    scores += jnp.take_along_axis(to_position, numbers, axis=3, mode="clip")
    scores += jnp.take_along_axis(to_content, numbers, axis=2, mode="clip")
    return _mixed(scores, visible(chosen(mask, slots)), v, dropout_rate, noise)


def _mixed(scores: Array, seen: Array, v: Array, rate: float, noise: Noise) -> Array:
    """Return dropout(softmax(scores f32[batch, heads, n, length])) @ v, [batch, n, heads, head_dim]."""
    probabilities = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", dropout(probabilities, rate, noise), v)


def attend_row(q: Array, context: Context, mask: Mask, buckets: Buckets, *, dropout_rate: float, noise: Noise) -> Array:
    """Attend within segments of whole rows -> like q [batch, length, heads, head_dim], a block of queries at a time.

    q, context: any float dtype; softmax in float32.   mask: segments alone.   dropout_rate: on the probabilities, drawn
    from `noise` (u32[batch, 2] or None).
    """
    length, block = q.shape[1], min(BLOCK, q.shape[1])
    blocks = -(-length // block)
    beyond = (0, 0), (0, blocks * block - length)
    # No token has segment -1, so none sees what is added to whole blocks.
    whole = lambda x, fill=0: jnp.pad(x, (*beyond, *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
    q, context = _scaled(q, context)
    # Each device's queries see all keys of their rows; if the mesh cuts rows, this gathers them.
    q, k, v = (constrain(whole(x), "batch", None, "heads", None) for x in (q, context.k, context.v))
    segments = whole(mask.segments, -1)
    tiles = k.reshape(k.shape[0], blocks, block, *k.shape[2:])
    band, windows = _bands(context, length, block, buckets)
    part = lambda array, start, size: jax.lax.dynamic_slice_in_dim(array, start, size, axis=1)

    def of_block(index: Array | int) -> Array:
        first, rest = index * block, (blocks - 1 - index) * block
        of_queries = part(q, first, block)
        with jax.named_scope(PAIRS):
            scores = jnp.einsum("bqhd,bkhd->bhqk", of_queries, k, preferred_element_type=jnp.float32)
            to_position = shared_product("bqhd,brhd->bhqr", of_queries, part(band, rest, (blocks + 1) * block))
            to_content = shared_product("bnkhd,bnrhd->bhnkr", tiles, part(windows, blocks - 1 - index, blocks))
        scores += shift(to_position, blocks * block)
        scores += jnp.moveaxis(shift(to_content, block), -1, 2).reshape(scores.shape)
        seen = part(segments, first, block)[:, None, :, None] == segments[:, None, None, :]
        with jax.named_scope(PAIRS):
            return _mixed(scores, seen, v, dropout_rate, None if noise is None else fold(noise, index))

    if blocks <= KEPT_BLOCKS:
        mixed = jnp.concatenate([of_block(index) for index in range(blocks)], axis=1)
    else:
        mixed = jnp.moveaxis(jax.lax.map(jax.checkpoint(of_block), jnp.arange(blocks)), 0, 1).reshape(q.shape)
    return constrain(mixed[:, :length], "batch", mask.axis, "heads", None)


def _bands(context: Context, length: int, block: int, buckets: Buckets) -> tuple[Array, Array]:
    """Return the keys of distances in falling order, [batch or 1, 2 * whole length, heads, head_dim], of which queries
    from `first` on read those from `whole length - block - first` on; and the queries of the distances between each
    query of a block and each key of another, [batch or 1, 2 * blocks - 1, 2 * block, heads, head_dim], from the
    furthest block of keys before the queries to the furthest behind them."""
    blocks = -(-length // block)
    falling = blocks * block - 1 - np.arange(2 * blocks * block)
    between = np.arange(blocks, -blocks, -1)[:, None] * block + 1 - block + np.arange(block)
    band = jnp.take(context.keys, _places(falling, length, buckets), axis=1)
    halves = jnp.take(context.queries, _places(between, length, buckets), axis=1)
    return band, jnp.concatenate([halves[:, 1:], halves[:, :-1]], axis=2)
