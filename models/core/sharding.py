"""Where activations lie on a mesh: models name the axes of an array, and the rules in force place it.

Nothing here knows a mesh's shape; `tpu/rules.py` makes the rules, and who traces a program puts them in force.
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
    """mesh: its devices.   spec: (axes of an activation, its shape) -> how it is cut; ValueError where that fails."""

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
    """The rules in force, None where there is no mesh of several devices."""
    return _rules.get()


def constrain(x: Array, *axes: str | None) -> Array:
    """x cut over the mesh by the names of its axes ('batch', 'length', 'heads', ...); without rules, x itself."""
    rules = _rules.get()
    if rules is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(rules.mesh, rules.spec(axes, x.shape)))


def per_row(vector: Array, x: Array) -> Array:
    """A parameter that broadcasts to x [rows, ...]: itself, or [rows, ...] of x's rank, a copy for each row.

    Copies where slices of TPUs share the rows, and the vector is the same at all of a row's positions: their gradient
    is summed over positions before it is over rows. XLA:TPU sums the latter with what goes between slices, and would
    read all of x again for it. Not where `sequence` cuts positions, which would exchange the sums of each row.
    """
    rules, shape = _rules.get(), (1,) * (x.ndim - 1 - vector.ndim) + vector.shape
    if rules is None or rules.mesh.shape["slice"] == 1 or rules.mesh.shape["sequence"] > 1 or 1 not in shape[:-1]:
        return vector
    return jax.lax.optimization_barrier(jnp.broadcast_to(vector, (x.shape[0], *shape)))


def parts_of(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Into how many parts the mesh cuts each axis of an activation; ValueError where it does not divide one."""
    rules = _rules.get()
    if rules is None:
        return (1,) * len(axes)

    def names(over):
        return () if over is None else (over,) if isinstance(over, str) else over

    return tuple(math.prod(rules.mesh.shape[name] for name in names(over)) for over in rules.spec(axes, shape))
