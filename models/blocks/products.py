"""Matrix products and their gradients, with what XLA:CPU needs to be fast."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array

from models.core.sharding import constrain, current_rules

FEW_ROWS = 512  # below it XLA:CPU's products are faster in the other order; measured on AVX-512

_turned: ContextVar[bool] = ContextVar("turned", default=False)


@contextlib.contextmanager
def turned_weights() -> Iterator[None]:
    """While a program is traced in this context, `product` expects few rows of x and w in memory as [out, in].

    So each output's weights are read in one stretch: 226 MB of them times 8 rows took one core 21 ms with XLA:CPU's
    YNNPACK, and 42 the other way; times one row 15 and 19.
    """
    token = _turned.set(True)
    try:
        yield
    finally:
        _turned.reset(token)


def product(x: Array, w: Array, held: Array | None = None) -> Array:
    """x [..., in] @ w f32[in, out] -> [..., out] in x's dtype, with a weight gradient that is also fast on CPUs.

    held: x as it is `kept`, for the gradient alone. What the way forward reads too JAX keeps rounded, to what it is;
    XLA:TPU does that apart, and does not write x into a loop's stack where it computes it.

    The weight's gradient leaves the product in float32, here as in `contraction` and `tied_logits`: devices and
    microbatches add such gradients up, and a sum in bfloat16 would round at every addition.
    """
    if current_rules() is not None and not _turned.get():
        # Rows and positions may be cut over different axes of the mesh.
        return _product(x, w, held)
    # One [rows, in] x [in, out] product: XLA:CPU is slower on [batch, length, in].
    flat = lambda x: None if x is None else x.reshape(-1, x.shape[-1])
    return _product(flat(x), w, flat(held)).reshape(*x.shape[:-1], w.shape[-1])


@jax.custom_vjp
def _product(x: Array, w: Array, held: Array | None) -> Array:
    return _product_forward(x, w, held)[0]


def _product_forward(x: Array, w: Array, held: Array | None) -> tuple[Array, tuple[Array, Array]]:
    w = w.astype(x.dtype)
    residuals = x if held is None else held, w
    if _turned.get():
        return jax.lax.optimization_barrier(w.T @ x.T).T, residuals  # the barrier keeps XLA from undoing the exchange
    return x @ w, residuals


def _product_gradients(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array, None]:
    x, w = residuals
    leading = tuple(range(x.ndim - 1))
    if x.ndim == 2:
        return g @ w.T, row_product(x, g), None
    return g @ w.T, jnp.tensordot(x, g, (leading, leading), preferred_element_type=jnp.float32), None


_product.defvjp(_product_forward, _product_gradients)


def row_product(x: Array, g: Array) -> Array:
    """x [rows, in], g [rows, out] -> x.T @ g f32[in, out], the gradient of a weight."""
    direct = lambda x, g: jnp.matmul(x.T, g, preferred_element_type=jnp.float32)
    return jax.lax.platform_dependent(x, g, cpu=_product_of_copy, default=direct)


def _product_of_copy(x: Array, g: Array) -> Array:
    """The same for XLA:CPU, whose Eigen is slow to read a left factor by columns: 103 GFLOP/s for [4096, 512].T @
    [4096, 128], 150 for the product of a copy of what is narrower, the copy counted."""
    held = jax.lax.optimization_barrier  # keeps XLA from taking x.T where it lies, and from exchanging factors

    def times(left, right):
        return jnp.matmul(held(left.T), right, preferred_element_type=jnp.float32)

    if x.shape[1] <= g.shape[1] or x.shape[0] < FEW_ROWS:  # with few rows copying the result is what costs
        return held(times(x, g))
    return held(times(g, x)).T


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contraction(equation: str, x: Array, w: Array) -> Array:
    """jnp.einsum(equation, x, w) as float32, multiplied in x's dtype; w float32, its gradient as in `product`."""
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


@jax.custom_vjp
def table_scores(hidden: Array, table: Array, bias: Array) -> Array:
    """hidden [n, width], table f32[vocab, width] -> their dot products plus bias f32[vocab]: f32[n, vocab]."""
    return _scores_forward(hidden, table, bias)[0]


def _scores_forward(hidden: Array, table: Array, bias: Array) -> tuple[Array, tuple[Array, Array]]:
    table = constrain(table.astype(hidden.dtype), "vocab", None)  # gathered after the cast: half the bytes

    def direct(hidden, table):
        return jnp.einsum("nw,vw->nv", hidden, table, preferred_element_type=jnp.float32)

    held = jax.lax.optimization_barrier
    if hidden.shape[0] >= FEW_ROWS:
        # XLA:CPU's Eigen is slow with a transposed factor: 757 against 530 ms, the copy counted, at [1024, 768] x
        # [50304, 768]. For the layers' weights, which lie in a stack, the copies cost what they save.
        def on_cpu(hidden, table):
            return jnp.matmul(hidden, held(table.T), preferred_element_type=jnp.float32)
    else:  # fast the other way round: 83 against 186 ms at [160, 768] x [30592, 768]

        def on_cpu(hidden, table):
            return held(direct(table, hidden)).T

    scores = jax.lax.platform_dependent(hidden, table, cpu=on_cpu, default=direct)
    return scores + bias, (hidden, table)


def _scores_gradients(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array, Array]:
    hidden, table = residuals
    # XLA:CPU adds up wide rows at a thirtieth of the memory's speed: 85 against 3 ms at [640, 30592].
    by_product = lambda g: jnp.ones(g.shape[0], g.dtype) @ g
    bias = jax.lax.platform_dependent(g, cpu=by_product, default=lambda g: g.sum(0))
    g = g.astype(hidden.dtype)
    return g @ table, row_product(g, hidden), bias


table_scores.defvjp(_scores_forward, _scores_gradients)
