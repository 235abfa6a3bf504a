"""Matrix products of activations and weights. The gradients of weights are float32: devices and microbatches add them
up, and a sum in bfloat16 would round at every addition."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from models.blocks import cpu
from models.core.sharding import constrain, current_rules


def product(x: Array, w: Array, held: Array | None = None) -> Array:
    """Return x [..., in] @ w f32[in, out], [..., out] in x's dtype.

    held: x marked as `kept`, read by the gradient only. If the forward pass also reads a kept array, JAX inserts a
    rounding to its own dtype, which XLA:TPU runs as a separate operation instead of writing x directly into the loop's
    stack.
    """
    if current_rules() is not None and not cpu.are_turned():
        # Keep the axes apart: the mesh may cut rows and positions over different axes.
        return _product(x, w, held)
    # As one [rows, in] x [in, out] product, because XLA:CPU is slower on [batch, length, in].
    flat = lambda x: None if x is None else x.reshape(-1, x.shape[-1])
    return _product(flat(x), w, flat(held)).reshape(*x.shape[:-1], w.shape[-1])


@jax.custom_vjp
def _product(x: Array, w: Array, held: Array | None) -> Array:
    return _product_forward(x, w, held)[0]


def _product_forward(x: Array, w: Array, held: Array | None) -> tuple[Array, tuple[Array, Array]]:
    w = w.astype(x.dtype)
    return cpu.turned_product(x, w) if cpu.are_turned() else x @ w, (x if held is None else held, w)


def _product_gradients(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array, None]:
    x, w = residuals
    if x.ndim == 2:
        return g @ w.T, row_product(x, g), None
    leading = tuple(range(x.ndim - 1))
    return g @ w.T, jnp.tensordot(x, g, (leading, leading), preferred_element_type=jnp.float32), None


_product.defvjp(_product_forward, _product_gradients)


def row_product(x: Array, g: Array) -> Array:
    """Return x.T @ g f32[in, out] for x [rows, in] and g [rows, out]: the gradient of a weight."""
    direct = lambda x, g: jnp.matmul(x.T, g, preferred_element_type=jnp.float32)
    return jax.lax.platform_dependent(x, g, cpu=cpu.weight_gradient, default=direct)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contraction(equation: str, x: Array, w: Array) -> Array:
    """Return jnp.einsum(equation, x, w) as float32, multiplied in x's dtype; w is float32."""
    return _contraction_forward(equation, x, w)[0]


def _contraction_forward(equation: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    w = w.astype(x.dtype)
    return jnp.einsum(equation, x, w, preferred_element_type=jnp.float32), (x, w)


def _contraction_gradients(equation: str, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    of_x, of_w, of_g = equation.replace("->", ",").split(",")
    x, w = residuals
    g = g.astype(x.dtype)
    wide = jnp.einsum(f"{of_x},{of_g}->{of_w}", x, g, preferred_element_type=jnp.float32)
    return jnp.einsum(f"{of_g},{of_w}->{of_x}", g, w), wide


contraction.defvjp(_contraction_forward, _contraction_gradients)


def shared_product(equation: str, x: Array, table: Array) -> Array:
    """Return jnp.einsum as float32 with a table [batch or 1, ...]; a table that rows share has a float32 gradient."""
    if table.shape[0] > 1:
        return jnp.einsum(equation, x, table, preferred_element_type=jnp.float32)
    left, right, out = equation.replace("->", ",").split(",")
    return contraction(f"{left},{right[1:]}->{out}", x, table[0].astype(jnp.float32))


@jax.custom_vjp
def table_scores(hidden: Array, table: Array, bias: Array) -> Array:
    """Return the dot products of hidden [n, width] and table f32[vocab, width] plus bias f32[vocab]: f32[n, vocab]."""
    return _scores_forward(hidden, table, bias)[0]


def _scores_forward(hidden: Array, table: Array, bias: Array) -> tuple[Array, tuple[Array, Array]]:
    table = constrain(table.astype(hidden.dtype), "vocab", None)  # cast before the all-gather, to halve its bytes
    direct = lambda hidden, table: jnp.einsum("nw,vw->nv", hidden, table, preferred_element_type=jnp.float32)
    return jax.lax.platform_dependent(hidden, table, cpu=cpu.scores, default=direct) + bias, (hidden, table)


def _scores_gradients(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array, Array]:
    hidden, table = residuals
    bias = jax.lax.platform_dependent(g, cpu=cpu.column_sums, default=lambda g: g.sum(0))
    g = g.astype(hidden.dtype)
    return g @ table, row_product(g, hidden), bias


table_scores.defvjp(_scores_forward, _scores_gradients)
