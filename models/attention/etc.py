"""Attention between a long input and separate global tokens: ETC (Ainslie et al. 2020, arXiv:2004.08483, section 3),
and, with a window of whole blocks, BigBird-ETC (Zaheer et al. 2020, arXiv:2007.14062, section 2).

There are two kinds of queries. Each has near keys, which are of its own kind, and far keys, of the other kind:

    long tokens     near: the blocks around the query's own     far: all global tokens
    global tokens   near: all global tokens (one block)         far: all long tokens

One softmax covers both. Each score gets the query's product with a relative key (Shaw et al. 2018, section 3.2; for
keys only, as in ETC). A label chooses the relative key: for near keys the clipped distance, for far keys whether the
long token belongs to the global one. `dense` is the definition, pair by pair; `blocked` computes the same in time and
memory linear in the long input, with plain operations on every device. There is no kernel.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention.distances import shift
from models.attention.mask import PAIRS
from models.blocks.dense import Dense
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.positions import gather_positions
from models.blocks.products import contraction
from models.core import noise as noises
from models.core.noise import dropout, site, stays
from models.core.parameters import Noise, parameter
from models.core.program import Program, kept
from models.core.sharding import constrain

KINDS = ("long", "global")  # of queries, in this order everywhere
FAR_LABELS = 2  # the last labels: the long token belongs to the global one, or to another

_product32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Operands(NamedTuple):
    """Inputs of attention for queries of one kind, any float dtype.

    q: [batch, n, heads, head_dim].   near_*: [batch, n, heads, head_dim].   far_*: [batch, m, heads, head_dim].
    relative: f32[labels, heads, head_dim], the relative keys of the distances from -k to k, then of `FAR_LABELS`.
    """

    q: Array
    near_keys: Array
    near_values: Array
    far_keys: Array
    far_values: Array
    relative: Array


class Sight(NamedTuple):
    """Which keys queries of one kind see, and which tokens belong together.

    near, far: i32[batch, n], i32[batch, m], segments; queries are the near tokens and see keys of their own segment.
    linked: bool[batch, n, m], whether the long token of a pair belongs to its global token.
    block, window: a query sees the near keys of `window` blocks of `block` tokens, with its own block in the middle.
    """

    near: Array
    far: Array
    linked: Array
    block: int
    window: int


class LongGlobalAttention(nn.Module):
    """The attention block with its residual: x -> norm(x + dropout(output(attended))) for each kind of token, with one
    norm for both.

    x: [batch, length, width] of the long tokens, [batch, globals, width] of the global ones. Each kind of query has its
    own projections: to q, to keys and values of each kind of token, and to the output.
    distance: k, beyond which distances are clipped.
    """

    sizes: LayerSizes
    program: Program
    distance: int

    @nn.compact
    def __call__(
        self, x: tuple[Array, Array], seen: tuple[Sight, Sight], noise: tuple[Noise, Noise], slots: Array | None = None
    ) -> tuple[Array, ...]:
        """seen, noise: for each kind of query.   slots: i32[batch, n], the only long tokens to compute; then no global
        tokens are computed."""
        sizes, program, width = self.sizes, self.program, x[0].shape[-1]
        sizes.check_usual("attention of long and global tokens")
        labels = 2 * self.distance + 1 + FAR_LABELS
        norm, computed = Norm(sizes.norm_epsilon, program.compute, name="norm"), []

        def dense_layer(name, inputs):
            return Dense(width, sizes.init_std, program.compute, name=name)(inputs)

        def project(name, inputs):
            return kept(dense_layer(name, inputs).reshape(*inputs.shape[:2], sizes.heads, -1))

        for near, far, near_x, far_x, sight, keys in zip(KINDS, KINDS[::-1], x, x[::-1], seen, noise, strict=True):
            relative = parameter(self, f"{near}_relative", nn.initializers.normal(sizes.init_std), (labels, width))
            operands = Operands(
                project(f"{near}_query", near_x),
                project(f"{near}_to_{near}_key", near_x),
                project(f"{near}_to_{near}_value", near_x),
                project(f"{near}_to_{far}_key", far_x),
                project(f"{near}_to_{far}_value", far_x),
                relative.reshape(labels, sizes.heads, -1),
            )
            attend = dense if program.attention == "dense" else blocked
            mixed = attend(operands, sight, dropout_rate=sizes.attention_dropout, noise=site(keys, 1))
            mixed = kept(mixed.reshape(near_x.shape))
            if slots is not None:
                mixed, near_x = gather_positions(mixed, slots), gather_positions(near_x, slots)
            y = dropout(dense_layer(f"{near}_output", mixed), sizes.dropout, site(keys, 2))
            axis = "length" if slots is None and near == KINDS[0] else None
            computed.append(constrain(norm(near_x + y), "batch", axis, None))
            if slots is not None:
                break
        return tuple(computed)


def sights(segments: Array, global_segments: Array, global_of: Array, block: int, window: int) -> tuple[Sight, Sight]:
    """Return what the long queries and the global queries see.
    segments, global_segments: i32[batch, length], i32[batch, globals]; 0 is padding, which real tokens do not see.
    global_of: i32[batch, length], the index of the global token that each long token belongs to, -1 for none."""
    linked = global_of[:, :, None] == jnp.arange(global_segments.shape[1])
    of_long = Sight(segments, global_segments, linked, block, window)
    of_globals = Sight(global_segments, segments, linked.swapaxes(1, 2), global_segments.shape[1], 1)
    return of_long, of_globals


def dense(operands: Operands, sight: Sight, *, dropout_rate: float, noise: Noise) -> Array:
    """Compute attention by its definition -> [batch, n, heads, head_dim]; softmax in float32.
    dropout_rate: on the probabilities, drawn from `noise` (u32[batch, 2] or None)."""
    n, heads, dtype = operands.q.shape[1], operands.q.shape[2], operands.q.dtype
    distances = operands.relative.shape[0] - FAR_LABELS
    position = jnp.arange(n)
    first = (position // sight.block - sight.window // 2) * sight.block  # first key in each query's window of blocks
    column = position - first[:, None]
    near = (column >= 0) & (column < sight.window * sight.block) & (sight.near[:, :, None] == sight.near[:, None, :])
    seen = jnp.concatenate([near, sight.near[:, :, None] == sight.far[:, None, :]], axis=2)
    distance = jnp.clip(position - position[:, None], -(distances // 2), distances // 2) + distances // 2
    of_far = jnp.where(sight.linked, distances, distances + 1)
    labels = jnp.concatenate([jnp.broadcast_to(distance, near.shape), of_far], axis=2)

    q = operands.q * operands.q.shape[-1] ** -0.5
    keys = jnp.concatenate([operands.near_keys, operands.far_keys], axis=1)
    by_label = contraction("bqhd,rhd->bhqr", q, operands.relative)
    with jax.named_scope(PAIRS):
        scores = _product32("bqhd,bkhd->bhqk", q, keys)
    scores += jnp.take_along_axis(by_label, labels[:, None], axis=-1)
    probabilities = jax.nn.softmax(jnp.where(seen[:, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    if noise is not None and dropout_rate > 0.0:
        of_near, of_far = _kept(heads, sight, dropout_rate, noise)
        of_near = jnp.take_along_axis(of_near, column[None, None], axis=-1, mode="clip")
        probabilities *= jnp.concatenate([of_near, of_far], axis=-1) / (1.0 - dropout_rate)
    values = jnp.concatenate([operands.near_values, operands.far_values], axis=1)
    with jax.named_scope(PAIRS):
        return jnp.einsum("bhqk,bkhd->bqhd", probabilities.astype(dtype), values)


def blocked(operands: Operands, sight: Sight, *, dropout_rate: float, noise: Noise) -> Array:
    """Compute the same as `dense` from the visible blocks only: n * (window * block + m) scores for each head."""
    batch, n, heads, size = operands.q.shape
    block, number = sight.block, -(-n // sight.block)
    cut = lambda x, fill=0: _cut(x, number, block, 1, fill)
    around = lambda x, fill=0: _around(cut(x, fill), sight.window // 2, fill)
    # One product for each query and label, spread over the keys afterwards: there are few labels and many keys.
    q = cut(operands.q * size**-0.5)
    by_label = contraction("bnqhd,rhd->bhnqr", q, operands.relative)
    of_near, (linked, other) = by_label[..., :-FAR_LABELS], jnp.split(by_label[..., -FAR_LABELS:], 2, axis=-1)
    near = _product32("bnqhd,bnkhd->bhnqk", q, around(operands.near_keys)) + _by_distance(of_near, sight.window)
    far = _product32("bnqhd,bmhd->bhnqm", q, operands.far_keys) + jnp.where(cut(sight.linked)[:, None], linked, other)

    query_segments = cut(sight.near, -1)[:, None, ..., None]

    def hide(scores, segments):
        return jnp.where(query_segments == segments, scores, jnp.finfo(jnp.float32).min)

    near, far = hide(near, around(sight.near, -1)[:, None, :, None]), hide(far, sight.far[:, None, None, None])
    top = jax.lax.stop_gradient(jnp.maximum(near.max(-1), far.max(-1)))[..., None]
    near, far = jnp.exp(near - top), jnp.exp(far - top)
    total = near.sum(-1) + far.sum(-1)
    if noise is not None and dropout_rate > 0.0:
        stays_near, stays_far = (_cut(x, number, block, 2) for x in _kept(heads, sight, dropout_rate, noise))
        near, far = jnp.where(stays_near, near, 0), jnp.where(stays_far, far, 0)
        total *= 1.0 - dropout_rate
    mixed = _product32("bhnqk,bnkhd->bnqhd", near.astype(q.dtype), around(operands.near_values))
    mixed += _product32("bhnqm,bmhd->bnqhd", far.astype(q.dtype), operands.far_values)
    mixed /= jnp.moveaxis(total, 1, -1)[..., None]
    return mixed.astype(q.dtype).reshape(batch, number * block, heads, size)[:, :n]


def _kept(heads: int, sight: Sight, rate: float, noise: Array) -> tuple[Array, Array]:
    """Return what dropout keeps: bool[batch, heads, n, window * block], indexed by place in the query's window of
    blocks, and bool[batch, heads, n, m]."""
    (_, n), m = sight.near.shape, sight.far.shape[1]

    def drawn(tag, keys):
        return stays(noises.bits(site(noise, tag), (heads, n, keys)), rate)

    return drawn(1, sight.window * sight.block), drawn(2, m)


def _cut(x: Array, number: int, block: int, axis: int, fill: int = 0) -> Array:
    """Pad an axis to whole blocks and split it in two: [..., number, block, ...]."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, number * block - x.shape[axis])
    filled = jnp.pad(x, missing, constant_values=fill)
    return filled.reshape(*x.shape[:axis], number, block, *x.shape[axis + 1 :])


def _around(x: Array, half: int, fill: int) -> Array:
    """Join each block [batch, number, block, ...] with its neighbours -> [batch, number, (2 half + 1) * block, ...]."""
    number = x.shape[1]
    wide = jnp.pad(x, [(0, 0), (half, half), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
    return jnp.concatenate([wide[:, at : at + number] for at in range(2 * half + 1)], axis=2)


def _by_distance(scores: Array, window: int) -> Array:
    """Spread scores by clipped distance [..., block, 2 k + 1] over the window's keys [..., block, window * block]."""
    block, clip = scores.shape[-2], scores.shape[-1] // 2
    farthest = (window // 2 + 1) * block - 1
    reach = min(clip, farthest)
    scores = scores[..., clip - reach : clip + reach + 1]
    # One distance more than exists, which `shift` requires.
    beyond = [(0, 0)] * (scores.ndim - 1) + [(farthest - reach, farthest - reach + 1)]
    return shift(jnp.pad(scores, beyond, mode="edge"), window * block)
