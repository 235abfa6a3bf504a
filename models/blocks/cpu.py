"""The same numbers in the forms that XLA:CPU computes fast; measured on AVX-512.

The mathematics is where these are called: `products.py`, `activations.py`, and attention by blocks and by a cache.
Other platforms meet `matmul` and `divide` alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array

FEW_ROWS = 512  # below it products are faster in the other order
_turned: ContextVar[bool] = ContextVar("turned", default=False)
_held = jax.lax.optimization_barrier  # XLA neither sees through it nor exchanges factors around it


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


def are_turned() -> bool:
    """Whether weights lie so."""
    return _turned.get()


def turned_product(x: Array, w: Array) -> Array:
    """x [rows, in] @ w [in, out] of weights that are turned."""
    return _held(w.T @ x.T).T


def weight_gradient(x: Array, g: Array) -> Array:
    """x [rows, in].T @ g [rows, out] as float32.

    Eigen is slow to read a left factor by columns: 103 GFLOP/s for [4096, 512].T @ [4096, 128], 150 for the product of
    a copy of what is narrower, the copy counted.
    """

    def times(left, right):
        return jnp.matmul(_held(left.T), right, preferred_element_type=jnp.float32)

    if x.shape[1] <= g.shape[1] or x.shape[0] < FEW_ROWS:  # with few rows copying the result is what costs
        return _held(times(x, g))
    return _held(times(g, x)).T


def scores(hidden: Array, table: Array) -> Array:
    """hidden [n, width] @ table [vocab, width].T as float32.

    Eigen is slow with a transposed factor: 757 against 530 ms, the copy counted, at [1024, 768] x [50304, 768]. Few
    rows are fast the other way round: 83 against 186 ms at [160, 768] x [30592, 768]. For the layers' weights, which
    lie in a stack, the copies cost what they save.
    """
    if hidden.shape[0] >= FEW_ROWS:
        return jnp.matmul(hidden, _held(table.T), preferred_element_type=jnp.float32)
    return _held(jnp.einsum("vw,nw->vn", table, hidden, preferred_element_type=jnp.float32)).T


def column_sums(g: Array) -> Array:
    """Of [rows, n], which are added up at a thirtieth of the memory's speed: 85 against 3 ms at [640, 30592]."""
    return jnp.ones(g.shape[0], g.dtype) @ g


@jax.custom_vjp
def matmul(x: Array, y: Array) -> Array:
    """x [..., n, m] @ y [..., m, d] as float32.

    By JAX's own rule y's gradient is turned round, and adding up windows of such takes four times as long.
    """
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _matmul_gradients(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, y = residuals
    g = g.astype(x.dtype)
    of_x = jnp.einsum("...nd,...md->...nm", g, y, preferred_element_type=jnp.float32)
    of_y = jnp.einsum("...nm,...nd->...md", x, g, preferred_element_type=jnp.float32)
    return of_x.astype(x.dtype), of_y.astype(y.dtype)


matmul.defvjp(lambda x, y: (matmul(x, y), (x, y)), _matmul_gradients)


@jax.custom_vjp
def divide(x: Array, total: Array) -> Array:
    """x f32[..., n] / total f32[..., 1]; the sum in total's gradient would be fused with the copies before it, and take
    five times as long as a product with ones."""
    return x / total


def _divide_gradients(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    y, total = residuals
    by_product = lambda x: jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision="highest")
    of_y = jax.lax.platform_dependent(g * y, cpu=by_product, default=lambda x: x.sum(-1, keepdims=True))
    return g / total, -of_y / total


divide.defvjp(lambda x, total: (y := x / total, (y, total)), _divide_gradients)


def again(x: Array) -> Array:
    """x, which XLA:CPU takes for another array: what follows from it is computed where it is read, in one pass.

    Else it writes what value and slope of an activation share for the backward pass, and reads it in a second one.
    """
    return x * jax.lax.platform_dependent(jnp.float32(1), cpu=_held, default=lambda factor: factor)


def behind_condition(put: Callable[[Array, Array, Array], Array], places: Array, new: Array, filled: Array) -> Array:
    """put(places, new, filled) for one row's [1, heads, places, head_dim], behind a condition that always holds.

    XLA:CPU drops the axis of one row for the products that read the result, and so writes it twice, each time into a
    copy of all places: 5 ms for a token of gpt2-small with 192 places.
    """
    return jax.lax.cond(filled < places.shape[2], put, lambda places, new, filled: places, places, new, filled)
