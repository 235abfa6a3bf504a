"""Sharding of activations on a mesh: models name the axes of an array, and the rules in force place it.

Nothing here knows a mesh's shape; `tpu/rules.py` makes the rules, and the code that traces a program puts them in
force.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]


class Rules(NamedTuple):
    """mesh: the device mesh.   spec: (axes of an activation, its shape) -> how it is sharded, or ValueError."""

    mesh: Mesh
    spec: Callable[[Axes, tuple[int, ...]], PartitionSpec]


_rules: ContextVar[Rules | None] = ContextVar("rules", default=None)


@contextlib.contextmanager
def placed_by(rules: Rules | None) -> Iterator[None]:
    """While a program is traced in this context, `constrain` follows the rules."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def current_rules() -> Rules | None:
    """Return the rules in force; None without a mesh of several devices."""
    return _rules.get()


def constrain(x: Array, *axes: str | None) -> Array:
    """Shard x over the mesh by the names of its axes ('batch', 'length', 'heads', ...); without rules, return x."""
    rules = _rules.get()
    if rules is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(rules.mesh, rules.spec(axes, x.shape)))


def per_row(vector: Array, x: Array) -> Array:
    """Return a parameter that broadcasts to x [rows, ...]: the vector itself, or a copy for each row, of x's rank.

    Copies are made if several TPU slices share the rows and the vector is the same at all positions of a row. Their
    gradient is then summed over positions before it is summed over rows; XLA:TPU sums over rows together with the
    exchange between slices, and would otherwise read all of x again for it. No copies are made if `sequence` cuts
    positions, because devices would exchange the sums of each row.
    """
    rules, shape = _rules.get(), (1,) * (x.ndim - 1 - vector.ndim) + vector.shape
    if rules is None or rules.mesh.shape["slice"] == 1 or rules.mesh.shape["sequence"] > 1 or 1 not in shape[:-1]:
        return vector
    return jax.lax.optimization_barrier(jnp.broadcast_to(vector, (x.shape[0], *shape)))


def parts_of(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return into how many parts the mesh cuts each axis of an activation; ValueError if it does not divide one."""
    rules = _rules.get()
    if rules is None:
        return (1,) * len(axes)

    def names(over):
        return () if over is None else (over,) if isinstance(over, str) else over

    return tuple(math.prod(rules.mesh.shape[name] for name in names(over)) for over in rules.spec(axes, shape))
