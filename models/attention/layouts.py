"""Where heads lie in the arrays that attention mixes, and the projections that write and read them there.

Every form of attention says which layout it takes; none of them projects.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.operands import Projections
from models.blocks.dense import Affine, add_bias, affine
from models.blocks.products import contraction, product
from models.core.program import kept

LANES = 128  # numbers in a TPU register's row


class Layout(NamedTuple):
    """operands: (x [batch, n, in] of the queries, x [batch, length, in] of the keys, weights, heads, dtype) -> what is
    mixed.   output: (what was mixed, the output's weights, dtype) -> [batch, n, width]."""

    operands: Callable[[Array, Array, Projections, int, jnp.dtype], tuple[Array, ...]]
    output: Callable[[Array, Affine, jnp.dtype], Array]


class Mixing(NamedTuple):
    """One way to compute attention.

    mix: (*operands, mask, *, dropout_rate, noise) -> the values, mixed by dropout(softmax(scores)); see
    `plain.attention`.
    """

    layout: Layout
    mix: Callable[..., Array]


def _each(project: Callable[[Array, Affine, int, jnp.dtype], Array]) -> Callable[..., tuple[Array, ...]]:
    """`Layout.operands`, queries, keys and values, each by a projection of its own."""

    def operands(x: Array, context: Array, weights: Projections, heads: int, dtype: jnp.dtype) -> tuple[Array, ...]:
        made = []
        for name, of in zip(Projections._fields, (x, context, context), strict=False):
            with jax.named_scope(name):
                made.append(kept(project(of, getattr(weights, name), heads, dtype)))
        return tuple(made)

    return operands


def _split(x: Array, weights: Affine, heads: int, dtype: jnp.dtype) -> Array:
    return affine(x, weights, dtype).reshape(*x.shape[:2], heads, -1)


def _joined(mixed: Array, weights: Affine, dtype: jnp.dtype) -> Array:
    return affine(kept(mixed.reshape(*mixed.shape[:2], -1)), weights, dtype)


def _to_heads(x: Array, weights: Affine, heads: int, dtype: jnp.dtype) -> Array:
    """XLA:TPU writes a product in this form at no cost; a transposition after it is a copy. So in `_from_heads`."""
    split = lambda array: array.reshape(*array.shape[:-1], heads, -1)
    y = contraction("blw,whd->bhld", x.astype(dtype), split(weights.kernel)).astype(dtype)
    return add_bias(y, None if weights.bias is None else split(weights.bias)[:, None, :])


def _from_heads(mixed: Array, weights: Affine, dtype: jnp.dtype) -> Array:
    kernel = weights.kernel.reshape(mixed.shape[1], mixed.shape[3], -1)
    return add_bias(contraction("bhld,hdw->blw", mixed.astype(dtype), kernel).astype(dtype), weights.bias)


def _products(x: Array, context: Array, weights: Projections, heads: int, dtype: jnp.dtype) -> tuple[tuple, tuple]:
    """One product for queries, keys and values of the same x, or one for the keys and values of another; biases are
    still to be added."""
    parts = [(x, weights[:3])] if context is x else [(x, weights[:1]), (context, weights[1:3])]
    products, biases = [], []
    for read, of in parts:
        # Without the barrier XLA:TPU transposes activations to take its gradient apart.
        kernel = jax.lax.optimization_barrier(interleaved(*(kernel for kernel, _ in of)))
        products.append(kept(product(read.astype(dtype), kernel)))
        biases.append(interleaved(*(jnp.zeros(w.shape[1:]) if bias is None else bias for w, bias in of)))
    return tuple(products), tuple(biases)


def _of_products(mixed: tuple[Array, Array], weights: Affine, dtype: jnp.dtype) -> Array:
    """mixed: heads that fill lanes up may be behind it; and the same as it is `kept`."""
    mixed, held = (x[..., : len(weights.kernel)] for x in mixed)
    return affine(mixed, weights, dtype, held)


def interleaved(*arrays: Array) -> Array:
    """n of [..., width] -> [..., n * width], 128 columns of each in turns, filled up with zeros: heads that nobody
    reads."""
    leading, padding = arrays[0].shape[:-1], [(0, 0)] * (arrays[0].ndim - 1) + [(0, -arrays[0].shape[-1] % LANES)]
    blocks = [jnp.pad(x, padding).reshape(*leading, -1, LANES) for x in arrays]
    return jnp.stack(blocks, -2).reshape(*leading, -1)


HEADS_APART = Layout(_each(_split), _joined)  # [batch, length, heads, head_dim]
HEADS_BESIDE = Layout(_each(lambda x, weights, _, dtype: affine(x, weights, dtype)), affine)  # [batch, length, width]
HEADS_FIRST = Layout(_each(_to_heads), _from_heads)  # [batch, heads, length, head_dim]
INTERLEAVED = Layout(_products, _of_products)  # products and biases, as `row_attention.Operands` has them
