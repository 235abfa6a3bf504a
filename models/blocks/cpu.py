"""Operations rewritten into forms that XLA:CPU computes faster, with the same result; measured on AVX-512. The callers
define the mathematics: `products.py` and attention with a cache."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array

FEW_ROWS = 512  # with fewer rows, products are faster with their factors swapped
_turned: ContextVar[bool] = ContextVar("turned", default=False)
_held = jax.lax.optimization_barrier  # XLA neither optimizes through it nor swaps factors around it


@contextlib.contextmanager
def turned_weights() -> Iterator[None]:
    """While a program is traced in this context, `product` expects x with few rows and w stored as [out, in].
    The weights of each output are then contiguous. For 226 MB of weights and 8 rows, one core took 21 ms with XLA:CPU's
    YNNPACK, instead of 42 ms; for one row, 15 instead of 19 ms."""
    token = _turned.set(True)
    try:
        yield
    finally:
        _turned.reset(token)


def are_turned() -> bool:
    """Whether weights are stored as [out, in]."""
    return _turned.get()


def turned_product(x: Array, w: Array) -> Array:
    """Return x [rows, in] @ w [in, out] for weights stored as [out, in]."""
    return _held(w.T @ x.T).T


def weight_gradient(x: Array, g: Array) -> Array:
    """Return x [rows, in].T @ g [rows, out] as float32.
    Eigen reads a left factor slowly by columns: 103 GFLOP/s for [4096, 512].T @ [4096, 128], against 150 with a copy of
    the narrower factor, including the copy."""

    def times(left, right):
        return jnp.matmul(_held(left.T), right, preferred_element_type=jnp.float32)

    if x.shape[1] <= g.shape[1] or x.shape[0] < FEW_ROWS:  # with few rows, copying the result would cost most
        return _held(times(x, g))
    return _held(times(g, x)).T


def scores(hidden: Array, table: Array) -> Array:
    """Return hidden [n, width] @ table [vocab, width].T as float32. Few rows are faster with the factors swapped: 83
    against 186 ms at [160, 768] x [30592, 768]; for many, no form shortened a step of gpt2-small."""
    if hidden.shape[0] >= FEW_ROWS:
        return jnp.matmul(hidden, table.T, preferred_element_type=jnp.float32)
    return _held(jnp.einsum("vw,nw->vn", table, hidden, preferred_element_type=jnp.float32)).T


def column_sums(g: Array) -> Array:
    """Sum g [rows, n] over rows by a product: 3 ms at [640, 30592]; XLA's sum takes 85, a 30th of memory's speed."""
    return jnp.ones(g.shape[0], g.dtype) @ g


def behind_condition(put: Callable[[Array, Array, Array], Array], places: Array, new: Array, filled: Array) -> Array:
    """Return put(places, new, filled) for one row, [1, heads, places, head_dim], behind a condition that always holds.
    Without it, XLA:CPU drops the axis of length 1 for the products that read the result, and so writes the result
    twice, each time into a copy of all places: 5 ms for a token of gpt2-small with 192 places."""
    return jax.lax.cond(filled < places.shape[2], put, lambda places, new, filled: places, places, new, filled)
