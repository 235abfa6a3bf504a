"""Layouts of heads in the arrays that attention computes with, and the projections that write and read them.

Every implementation of attention names its layout; none of them projects.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.operands import LANES, Projections
from models.attention.rotary import Turns, turned
from models.blocks.dense import Affine, add_bias, affine
from models.blocks.products import contraction, product
from models.core.program import kept


class Layout(NamedTuple):
    """operands: (x [batch, n, in] of the queries, x [batch, length, in] of the keys, weights, heads, dtype, x [batch,
    length, in] of the values if it is not that of the keys) -> the inputs of `Mixing.mix`.   output: (its result, the
    output's weights, dtype) -> [batch, n, width].
    turn: (operands, turns of the queries, turns of the keys) -> the operands with rotary positions."""

    operands: Callable[..., tuple[Array, ...]]
    output: Callable[[Array, Affine, jnp.dtype], Array]
    turn: Callable[[tuple[Array, ...], Turns, Turns], tuple[Array, ...]]


class Mixing(NamedTuple):
    """One way to compute attention.
    mix: (*operands, mask, *, dropout_rate, noise) -> dropout(softmax(scores)) @ values; see `plain.attention`."""

    layout: Layout
    mix: Callable[..., Array]


def _each(project: Callable[[Array, Affine, int, jnp.dtype], Array]) -> Callable[..., tuple[Array, ...]]:
    """Return `Layout.operands` that projects queries, keys and values separately."""

    def operands(
        x: Array, context: Array, weights: Projections, heads: int, dtype: jnp.dtype, values: Array | None = None
    ) -> tuple[Array, ...]:
        projected = []
        sources = x, context, context if values is None else values
        for name, inputs in zip(Projections._fields, sources, strict=False):
            with jax.named_scope(name):
                projected.append(kept(project(inputs, getattr(weights, name), heads, dtype)))
        return tuple(projected)

    return operands


def _split(x: Array, weights: Affine, heads: int, dtype: jnp.dtype) -> Array:
    return affine(x, weights, dtype).reshape(*x.shape[:2], heads, -1)


def _joined(mixed: Array, weights: Affine, dtype: jnp.dtype) -> Array:
    return affine(kept(mixed.reshape(*mixed.shape[:2], -1)), weights, dtype)


def _to_heads(x: Array, weights: Affine, heads: int, dtype: jnp.dtype) -> Array:
    """Project x to [batch, heads, length, head_dim]. XLA:TPU writes a product in this layout at no cost, whereas a
    transposition after it is a copy; the same holds for `_from_heads`."""
    split = lambda array: array.reshape(*array.shape[:-1], heads, -1)
    y = contraction("blw,whd->bhld", x.astype(dtype), split(weights.kernel)).astype(dtype)
    return add_bias(y, None if weights.bias is None else split(weights.bias)[:, None, :])


def _from_heads(mixed: Array, weights: Affine, dtype: jnp.dtype) -> Array:
    kernel = weights.kernel.reshape(mixed.shape[1], mixed.shape[3], -1)
    return add_bias(contraction("bhld,hdw->blw", mixed.astype(dtype), kernel).astype(dtype), weights.bias)


def _products(
    x: Array, context: Array, weights: Projections, heads: int, dtype: jnp.dtype, values: Array | None = None
) -> tuple[tuple, tuple]:
    """Compute one product for queries, keys and values of the same x, or one for queries and one for keys and values of
    another context; return products and the biases still to be added. With values of another x than the keys, three
    products take the place of the first kind."""
    if values is not None:
        apart = [product(of.astype(dtype), w.kernel) for of, w in zip((x, context, values), weights[:3], strict=True)]
        return (kept(interleaved(*apart)),), (interleaved(*(w.bias for w in weights[:3])),)
    parts = [(x, weights[:3])] if context is x else [(x, weights[:1]), (context, weights[1:3])]
    products, biases = [], []
    for inputs, affines in parts:
        # Without the barrier XLA:TPU transposes activations to split the gradient of the joined kernel.
        kernel = jax.lax.optimization_barrier(interleaved(*(kernel for kernel, _ in affines)))
        products.append(kept(product(inputs.astype(dtype), kernel)))
        biases.append(interleaved(*(jnp.zeros(w.shape[1:]) if bias is None else bias for w, bias in affines)))
    return tuple(products), tuple(biases)


def _turn(axis: int | None) -> Callable[..., tuple[Array, ...]]:
    """Return `Layout.turn` for separate queries and keys.   axis: of the heads; None if they lie side by side."""

    def turn(operands: tuple[Array, ...], of_queries: Turns, of_keys: Turns) -> tuple[Array, ...]:
        q, k, v = operands
        along = lambda turns: turns if axis is None else Turns(*(jnp.expand_dims(array, axis) for array in turns))
        return kept(turned(q, along(of_queries))), kept(turned(k, along(of_keys))), v

    return turn


def _turn_products(operands: tuple[tuple, tuple], of_queries: Turns, of_keys: Turns) -> tuple[tuple, tuple]:
    """Turn queries and keys in the product of a row; its values turn by nothing. The biases, which a kernel adds later,
    must be zeros."""
    (products,), biases = operands
    width = products.shape[-1] // 3
    repeat = lambda array: jnp.tile(array, width // array.shape[-1])
    still = Turns(jnp.ones_like(of_keys.cosines), jnp.zeros_like(of_keys.sines))
    head_dim = of_keys.cosines.shape[-1]
    turns = Turns(*(interleaved(*map(repeat, arrays)) for arrays in zip(of_queries, of_keys, still, strict=True)))
    return (kept(turned(products, turns, head_dim)),), biases


def _of_products(mixed: tuple[Array, Array], weights: Affine, dtype: jnp.dtype) -> Array:
    """mixed: (the attended values, perhaps followed by padding heads; the same marked as `kept`)."""
    mixed, held = (x[..., : len(weights.kernel)] for x in mixed)
    return affine(mixed, weights, dtype, held)


def interleaved(*arrays: Array) -> Array:
    """Interleave n arrays [..., width] -> [..., n * width], 128 columns of each in turn; the width is padded with zeros
    to whole blocks of 128, which are heads that nothing reads."""
    leading, padding = arrays[0].shape[:-1], [(0, 0)] * (arrays[0].ndim - 1) + [(0, -arrays[0].shape[-1] % LANES)]
    blocks = [jnp.pad(x, padding).reshape(*leading, -1, LANES) for x in arrays]
    return jnp.stack(blocks, -2).reshape(*leading, -1)


HEADS_APART = Layout(_each(_split), _joined, _turn(2))  # [batch, length, heads, head_dim]
_beside = lambda x, weights, _, dtype: affine(x, weights, dtype)
HEADS_BESIDE = Layout(_each(_beside), affine, _turn(None))  # [batch, length, width]
HEADS_FIRST = Layout(_each(_to_heads), _from_heads, _turn(1))  # [batch, heads, length, head_dim]
INTERLEAVED = Layout(_products, _of_products, _turn_products)  # products and biases, see `row_attention.Operands`
