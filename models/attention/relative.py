"""Attention with relative positions and a memory (Dai et al. 2019, arXiv:1901.02860, section 3), and the blocks around
it that Transformer-XL and XLNet share."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.kernels.relative_kernel import LANES, Inputs, Setting, reach, relative_kernel
from models.attention.kernels.table import Attention, require
from models.attention.mask import Mask, only_of_seen, visible
from models.blocks.dense import Projection
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.products import contraction
from models.core.noise import ahead, dropout, site
from models.core.parameters import Noise
from models.core.program import Program, kept
from models.core.sharding import constrain, current_rules


def sinusoids(first: int, last: int, width: int) -> np.ndarray:
    """f32[first - last + 1, width]: the encodings of the distances first, first - 1, ..., last; sines, then cosines."""
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(first, last - 1, -1)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


def distance_table(table: np.ndarray, rate: float, noise: Noise) -> Array:
    """A table [distances, width] after dropout, for each row its own: f32[batch or 1, distances, width]."""
    rows = 1 if noise is None or rate == 0.0 else noise.shape[0]
    return dropout(jnp.broadcast_to(table, (rows, *table.shape)), rate, noise)


def shift(scores: Array, keys: int) -> Array:
    """Scores by distance [..., length, distances] -> by key [..., length, keys].

    distances > keys; query i of `length` finds its key j at the distance number j + length - 1 - i.
    """
    *leading, length, distances = scores.shape
    # Row after row, one step to the next query is one place less than a row: cut into rows of that size.
    flat = scores.reshape(*leading, length * distances)[..., length - 1 : length * distances - 1]
    return flat.reshape(*leading, length, distances - 1)[..., :keys]


def shift_to(starts: Array, scores: Array, keys: int) -> Array:
    """`shift` for chosen queries: scores [batch, heads, n, distances]; the first key's number i32[batch, n] of each.

    A gather: shifting by powers of two, which needs none, took 2 to 9 times as long on a CPU.
    """
    numbers = starts[:, None, :, None] + jnp.arange(keys)
    return jnp.take_along_axis(scores, numbers, axis=-1, mode="clip")


class Context(NamedTuple):
    """What queries attend to, heads side by side: k, v [batch, memory + length, width], r [batch or 1, distances,
    width], the keys of the distances."""

    k: Array
    v: Array
    r: Array


class Types(NamedTuple):
    """For the scores by types: i32[batch, n] of the queries, i32[batch, memory + length] of the keys."""

    queries: Array
    keys: Array


class Biases(NamedTuple):
    """What is added to a query for each kind of score, f32[heads * head_dim] each: u and v of Dai et al. 2019; for
    types (Yang et al. 2019, section 2.5) also `type`, and `types` [2, heads * head_dim], the keys of 'same' and
    'other'."""

    content: Array
    position: Array
    type: Array | None = None
    types: Array | None = None


def relative_attention(
    q: Array, context: Context, biases: Biases, mask: Mask, types: Types | None, heads: int, *,
    dropout_rate: float, noise: Noise,
) -> Array:  # fmt: skip
    """Attention by content and by distance (Dai et al. 2019, section 3.3, terms a to d) -> like q.

    q: [batch, n, width], heads side by side, any float dtype; softmax in float32.
    types: None where scores have no part by types, like that of `biases`.
    dropout_rate: on the probabilities, drawn from `noise` (u32[batch, 2] or None).
    """
    split = lambda x: x.reshape(*x.shape[:-1], heads, -1)
    (k, v, r), axis, scale = map(split, context), mask.axis, split(q).shape[-1] ** -0.5
    # In float32, so that the biases' gradients, sums over all rows, are too.
    added = lambda bias: ((split(q).astype(jnp.float32) + split(bias)) * scale).astype(q.dtype)
    add = lambda bias: constrain(added(bias), "batch", axis, "heads", None)
    # Each device's queries see all keys of their rows: with a cut length, that gathers keys and values.
    k, v = (constrain(x, "batch", None, "heads", None) for x in (k, v))
    product32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product32("bqhd,bkhd->bhqk", add(biases.content), k)
    if r.shape[0] == 1:
        distances = contraction("bqhd,rhd->bhqr", add(biases.position), r[0].astype(jnp.float32))
    else:
        distances = product32("bqhd,brhd->bhqr", add(biases.position), r)
    number = k.shape[1]
    scores += shift(distances, number) if mask.after is None else shift_to(mask.after, distances, number)
    if types is not None:
        other = types.queries[:, None, :, None] != types.keys[:, None, None, :]
        same, different = jnp.moveaxis(contraction("bqhd,thd->bhqt", add(biases.type), split(biases.types)), -1, 0)
        scores += jnp.where(other, different[..., None], same[..., None])
    seen = visible(mask)
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    probabilities = dropout(probabilities, dropout_rate, noise)
    mixed = only_of_seen(jnp.einsum("bhqk,bkhd->bqhd", probabilities, v), seen)
    return constrain(mixed, "batch", axis, "heads", None).reshape(q.shape)


def asked(n: int, heads: int, dropout_rate: float, context: Context, mask: Mask) -> Attention:
    """What `by_kernel` is asked for with n queries to this context."""
    _, keys, width = context.k.shape
    chosen = mask.after is not None
    length = context.r.shape[1] - keys if chosen else n  # chosen queries find distances up to that of the row's end
    return Attention(length, width, heads, dropout_rate, keys - length, chosen, mask.causal, mask.ranks is not None)


def by_kernel(
    q: Array, context: Context, biases: Biases, mask: Mask, types: Types | None, heads: int, *,
    dropout_rate: float, noise: Noise, interpret: bool = False,
) -> Array:  # fmt: skip
    """`relative_attention` by a TPU kernel, on a mesh each device with its rows and heads; ValueError for what it has
    not.   interpret: run as plain operations, on any platform."""
    require("relative", asked(q.shape[1], heads, dropout_rate, context, mask))
    setting = Setting(
        head_dim=q.shape[2] // heads,
        n=q.shape[1],
        rate=0.0 if noise is None else dropout_rate,
        chosen=mask.after is not None,
        types=types is not None,
        itself=mask.itself,
        interpret=interpret,
    )
    inputs = packed(q, context, biases, mask, types, noise)
    rules = current_rules()
    if rules is None:
        return relative_kernel(inputs, setting)[:, : setting.n]
    of_row = ("batch", None, "heads")
    axes = Inputs(*[of_row] * 4, (None, "heads"), ("batch", None, None), ("batch", None, None), ("batch", None))
    axes = axes._replace(r=(None if inputs.r.shape[0] == 1 else "batch", None, "heads"))
    specs = Inputs(*(rules.spec(names, x.shape) for names, x in zip(axes, inputs, strict=True)))

    def attend(own: Inputs) -> Array:
        shared, local = specs.q[2], own.q.shape[2] // setting.head_dim
        first = 0 if shared is None else jax.lax.axis_index(shared) * local  # of this device's heads
        drawn = ahead(own.noise, first * setting.n * own.k.shape[1])
        return relative_kernel(own._replace(noise=drawn, r=own.r.astype(q.dtype)), setting)

    attend = jax.shard_map(attend, mesh=rules.mesh, in_specs=(specs,), out_specs=specs.q, check_vma=False)
    # Devices add up the gradient of distances that all rows share: in float32.
    return attend(inputs._replace(r=inputs.r.astype(jnp.float32)))[:, : setting.n]


def packed(q: Array, context: Context, biases: Biases, mask: Mask, types: Types | None, noise: Noise) -> Inputs:
    """The kernel's inputs, padded to whole blocks of lanes."""
    batch, n, _ = q.shape
    fill = lambda x, like: jnp.zeros_like(like) if x is None else x
    of_queries, of_keys = types or (None, None)
    own = [mask.thresholds, mask.own, fill(of_queries, mask.own), fill(mask.after, mask.own)]
    of_keys = [mask.ranks, mask.segments, fill(of_keys, mask.segments)]
    content, position, kind, pair = biases
    other = None if pair is None else pair[1] - pair[0]  # the softmax does not see what both have
    whole = -(-n // LANES) * LANES
    length = n if mask.after is None else context.r.shape[1] - context.k.shape[1]
    long = lambda x, size: jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0)))
    return Inputs(
        q=long(q, whole),
        k=context.k,
        v=context.v,
        r=long(context.r, context.k.shape[1] + reach(length, mask.after is not None)),
        biases=jnp.stack([content, position, fill(kind, content), fill(other, content)]),
        # No key is of segment -1: added queries see nothing.
        queries=jnp.pad(jnp.stack(own, axis=1), ((0, 0), (0, 0), (0, whole - n)), constant_values=-1),
        keys=jnp.stack(of_keys, axis=1),
        noise=jnp.zeros((batch, 2), jnp.uint32) if noise is None else noise,
    )


class RelativeAttention(nn.Module):
    """Multi-head relative attention with its residual and norm."""

    sizes: LayerSizes
    program: Program

    def setup(self):
        sizes, dtype = self.sizes, self.program.compute
        project = lambda: Projection(sizes.width, sizes.init_std, dtype)
        self.query, self.key, self.value, self.position, self.output = (project() for _ in range(5))
        self.norm = Norm(sizes.norm_epsilon, dtype)

    def context(self, hidden: Array, table: Array) -> Context:
        """hidden [batch, memory + length, width] and a table of distances [batch or 1, distances, width]."""
        return Context(*map(kept, (self.key(hidden), self.value(hidden), self.position(table))))

    def __call__(
        self, x: Array, context: Context, biases: Biases, mask: Mask, noise: Noise, types: Types | None = None
    ) -> Array:
        """x [batch, n, width] -> norm(x + dropout(output(attend(x)))); see `relative_attention`."""
        sizes = self.sizes
        q, rate = kept(self.query(x)), sizes.attention_dropout
        attend = by_kernel if self.program.attention == "relative" else relative_attention
        mixed = attend(q, context, biases, mask, types, sizes.heads, dropout_rate=rate, noise=site(noise, 1))
        y = self.output(kept(mixed))
        return constrain(self.norm(x + dropout(y, sizes.dropout, site(noise, 2))), "batch", mask.axis, None)


def projection_flops(width: int, feed_forward: int, queries: int, keys: int, distances: int) -> float:
    """Forward FLOPs of one layer's products with weights: q and output, k and v, the distances' keys, feed-forward."""
    return 2.0 * width * (width * (2 * queries + 2 * keys + distances) + 2 * feed_forward * queries)


def attention_flops(width: int, queries: int, keys: int, distances: int) -> float:
    """Forward FLOPs of one layer's scores by content and by distance, and of the mixing of values."""
    return 2.0 * width * queries * (2 * keys + distances)
