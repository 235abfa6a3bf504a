"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4): Adam without a mean of gradients, whose squares are
kept as the means of rows and columns, and whose steps are in proportion to the parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from models.core.parameters import LAYERS, Parameter, Params, leaves, nest

SQUARE = 1e-30  # added to squares of gradients
SMALLEST = 1e-3  # root mean square of parameters, at least, to which steps are in proportion
DECAY = 0.8  # after t steps the mean of squares keeps 1 - t ** -DECAY
CLIP = 1.0  # root mean square of a direction, at most


class FactoredSquares(NamedTuple):
    """Running means of squared gradients.

    rows: of each matrix of each layer the means over its last axis [..., n, 1]; of a vector what it has itself.
    columns: the means over the last axis but one [..., 1, m]; of a vector nothing, [..., 1].   count: i32[], steps.
    """

    count: Array
    rows: Params
    columns: Params


def scale_by_factored_squares(table: Sequence[Parameter], vocab_size: int) -> optax.GradientTransformationExtraArgs:
    """Gradients divided by the root of their running mean square, clipped for each parameter of each layer."""
    of_path = {parameter.path: parameter for parameter in table}

    def init(params: Params) -> FactoredSquares:
        def like(axis: int) -> Params:
            def of(keys, leaf):
                keeps = not _is_matrix(of_path["/".join(key.key for key in keys)])
                if keeps and axis == -1:
                    return jnp.zeros_like(leaf)
                axes = {-1 if keeps else axis}
                return jnp.zeros([1 if i - leaf.ndim in axes else n for i, n in enumerate(leaf.shape)], leaf.dtype)

            return jax.tree_util.tree_map_with_path(of, params)

        return FactoredSquares(jnp.int32(0), like(-1), like(-2))

    def update(gradients: Params, state: FactoredSquares, params: Params, *, finite: Array | bool = True):
        count = state.count + jnp.where(finite, 1, 0)
        kept = 1.0 - count.astype(jnp.float32) ** -DECAY
        rows, columns, directions = dict(leaves(state.rows)), dict(leaves(state.columns)), {}
        for path, gradient in leaves(gradients):
            squares, parameter = jnp.square(gradient) + SQUARE, of_path[path]

            def mean(old, axis, squares=squares):
                new = squares if axis is None else squares.mean(axis, keepdims=True)
                return jnp.where(finite, kept * old + (1.0 - kept) * new, old)

            if _is_matrix(parameter):
                row, column = rows[path], columns[path] = mean(rows[path], -1), mean(columns[path], -2)
                inverse = jax.lax.rsqrt(row / row.mean(-2, keepdims=True)) * jax.lax.rsqrt(column)
            else:
                rows[path] = mean(rows[path], None)
                inverse = jax.lax.rsqrt(rows[path])
            direction = gradient * inverse
            size = root_mean_square(parameter, direction, vocab_size)
            directions[path] = direction / jnp.maximum(size / CLIP, 1.0)
        return nest(directions), FactoredSquares(count, nest(rows), nest(columns))

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_size(table: Sequence[Parameter], vocab_size: int) -> optax.GradientTransformation:
    """Directions times the root mean square of each parameter of each layer, at least `SMALLEST`."""
    of_path = {parameter.path: parameter for parameter in table}

    def update(directions: Params, state: Any, params: Params):
        sizes = {path: root_mean_square(of_path[path], leaf, vocab_size) for path, leaf in leaves(params)}
        flat = leaves(directions)
        return nest({path: jnp.maximum(sizes[path], SMALLEST) * leaf for path, leaf in flat}), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def root_mean_square(parameter: Parameter, x: Array, vocab_size: int) -> Array:
    """Of each layer's slice of x, which is like the parameter; padding of a vocabulary, which is zeros, does not count:
    f32[layers or 1, 1, ...]."""
    axes = tuple(range(parameter.axes[:1] == (LAYERS,), x.ndim))
    counted = 1
    for axis in axes:
        counted *= vocab_size if parameter.axes[axis] == "vocab" else x.shape[axis]
    return jnp.sqrt(jnp.square(x).sum(axes, keepdims=True) / counted)


def _is_matrix(parameter: Parameter) -> bool:
    return len(parameter.layer_axes) >= 2
