"""Global tokens with projections of their own (Beltagy et al. 2020, arXiv:2004.05150, section 3.1)."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention import plain
from models.attention.mask import Mask, chosen, only_of_seen, visible
from models.blocks.dense import Affine, Weights, affine
from models.blocks.layer import LayerSizes
from models.blocks.positions import gather_positions, put_positions
from models.blocks.products import contraction
from models.core.noise import dropout
from models.core.parameters import Noise
from models.core.program import Program
from models.core.sharding import constrain


class GlobalWeights(NamedTuple):
    """A layer's projections [width, heads * head_dim] for what global tokens see."""

    query: Affine
    key: Affine
    value: Affine


class GlobalTokens(nn.Module):
    """x and y [batch, length, width], what attention reads and gives -> y, with the global tokens' own in their places.

    They see all tokens of their segment. With slots i32[batch, n] y is of these positions alone.
    """

    sizes: LayerSizes
    program: Program

    @nn.compact
    def __call__(self, x: Array, y: Array, mask: Mask, output: Affine, noise: Noise, slots: Array | None) -> Array:
        sizes, compute, width = self.sizes, self.program.compute, x.shape[-1]
        project = lambda name: Weights(sizes.heads_width, sizes.init_std, name=name)(width)
        weights = GlobalWeights(*map(project, GlobalWeights._fields))
        if mask.globals is None:
            return y
        sizes.check_usual("attention of global tokens with projections of their own")
        if mask.biased:
            raise ValueError("global tokens with projections of their own add no bias to the scores: leave it out")
        queries = affine(gather_positions(x, mask.globals), weights.query, compute)
        queries = queries.reshape(*mask.globals.shape, sizes.heads, -1)
        of_queries = chosen(dataclasses.replace(mask, blocks=None, globals=None), mask.globals)
        # Where they are few, what projects all tokens costs more than what each head of theirs does with all widths.
        form = folded if mask.globals.shape[1] * (sizes.heads - 1) < width else projected
        mixed = form(queries, x.astype(compute), weights, of_queries, sizes.attention_dropout, noise)
        attended = affine(mixed.reshape(*mask.globals.shape, -1), output, compute)
        return put_positions(y, attended, mask.globals, slots)


def folded(queries: Array, x: Array, weights: GlobalWeights, mask: Mask, rate: float, noise: Noise) -> Array:
    """What queries [batch, n, heads, head_dim] mix of x [batch, length, width] -> like queries.

    Keys and values are never made: a query is projected back to x's width, and the mean of x to the values'. The keys'
    bias adds the same to all scores of a query, which a softmax ignores.
    """
    cut = lambda of: of.kernel.reshape(x.shape[-1], *queries.shape[2:])
    back = contraction("bghd,whd->bhgw", queries * queries.shape[-1] ** -0.5, cut(weights.key))
    # With x first: XLA:CPU would turn it round for the other order.
    scores = jnp.einsum("blw,bhgw->blhg", x, back.astype(x.dtype), preferred_element_type=jnp.float32)
    scores = constrain(jnp.moveaxis(scores, 1, 3), "batch", "heads", None, "length")
    seen = visible(mask)
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    shares = dropout(jax.nn.softmax(scores, axis=-1), rate, noise)
    means = jnp.einsum("bhgl,blw->bhgw", shares.astype(x.dtype), x)
    values = contraction("bhgw,whd->bghd", means, cut(weights.value))
    bias = weights.value.bias.reshape(queries.shape[2:])
    mixed = values + shares.sum(-1).swapaxes(1, 2)[..., None] * bias
    return (only_of_seen(mixed, seen) if mask.blind else mixed).astype(x.dtype)


def projected(queries: Array, x: Array, weights: GlobalWeights, mask: Mask, rate: float, noise: Noise) -> Array:
    """The same by keys and values of all tokens."""
    made = lambda of: affine(x, of, x.dtype).reshape(*x.shape[:2], *queries.shape[2:])
    return plain.attention(queries, made(weights.key), made(weights.value), mask, dropout_rate=rate, noise=noise)
