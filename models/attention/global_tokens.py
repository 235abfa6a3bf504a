"""Attention of global tokens with separate projections (Beltagy et al. 2020, arXiv:2004.05150, section 3.1)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention import plain
from models.attention.mask import Mask, chosen, only_of_seen, visible
from models.attention.operands import Projections
from models.blocks.dense import Affine, Weights, affine
from models.blocks.layer import LayerSizes
from models.blocks.positions import gather_positions, put_positions
from models.blocks.products import contraction
from models.core.noise import dropout
from models.core.parameters import Noise
from models.core.program import Program
from models.core.sharding import constrain


class GlobalTokens(nn.Module):
    """Returns y with the outputs at global tokens replaced by those of their own attention.

    x, y: [batch, length, width], input and output of the layer's attention; with slots i32[batch, n], y has these
    positions only. A global token sees all tokens of its segment.
    """

    sizes: LayerSizes
    program: Program

    @nn.compact
    def __call__(self, x: Array, y: Array, mask: Mask, output: Affine, noise: Noise, slots: Array | None) -> Array:
        sizes, compute, width = self.sizes, self.program.compute, x.shape[-1]
        project = lambda name: Weights(sizes.heads_width, sizes.init_std, name=name)(width)
        weights = Projections(*map(project, Projections._fields[:3]), output)
        if mask.globals is None:
            return y
        sizes.check_usual("attention of global tokens with projections of their own")
        if mask.biased:
            raise ValueError("global tokens with projections of their own add no bias to the scores: leave it out")
        queries = affine(gather_positions(x, mask.globals), weights.query, compute)
        queries = queries.reshape(*mask.globals.shape, sizes.heads, -1)
        of_queries = chosen(dataclasses.replace(mask, blocks=None, globals=None), mask.globals)
        # With few global tokens, projecting all tokens to keys and values would cost more than `folded`.
        form = folded if mask.globals.shape[1] * (sizes.heads - 1) < width else projected
        mixed = form(queries, x.astype(compute), weights, of_queries, sizes.attention_dropout, noise)
        attended = affine(mixed.reshape(*mask.globals.shape, -1), output, compute)
        return put_positions(y, attended, mask.globals, slots)


def folded(queries: Array, x: Array, weights: Projections, mask: Mask, rate: float, noise: Noise) -> Array:
    """Attend from queries [batch, n, heads, head_dim] to x [batch, length, width] -> like queries.
    Keys and values are never computed: each query is projected back to x's width, and the weighted mean of x to the
    values' width. The bias of the keys adds the same to all scores of a query, which the softmax ignores."""
    cut = lambda projection: projection.kernel.reshape(x.shape[-1], *queries.shape[2:])
    back = contraction("bghd,whd->bhgw", queries * queries.shape[-1] ** -0.5, cut(weights.key))
    # x comes first: with the other order XLA:CPU would transpose it.
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


def projected(queries: Array, x: Array, weights: Projections, mask: Mask, rate: float, noise: Noise) -> Array:
    """Compute the same as `folded` from keys and values of all tokens."""
    project = lambda weights: affine(x, weights, x.dtype).reshape(*x.shape[:2], *queries.shape[2:])
    return plain.attention(queries, project(weights.key), project(weights.value), mask, dropout_rate=rate, noise=noise)
