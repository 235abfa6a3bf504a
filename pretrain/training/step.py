"""The train step and the evaluation step: the only two jitted programs of a run."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from models.core.noise import row_keys
from models.core.parameters import Params, leaves, nest
from pretrain.objectives.figures import Sums
from pretrain.objectives.objective import Batch, Moment, Objective
from pretrain.objectives.teacher import TEACHERS, Bound
from pretrain.optimizers import clip
from pretrain.recipe import Recipe
from pretrain.schedules import learning_rate
from pretrain.state import TrainState
from tpu.rules import is_axes


class Metrics(NamedTuple):
    """What one step says of itself: the loss, the sums of its terms, the objective's counts, norms, the rate."""

    loss: Array
    sums: Sums
    counts: dict[str, Array]
    gradient_norm: Array
    learning_rate: Array
    skipped: Array


def new_state(params: Params, optimizer: optax.GradientTransformation, carry) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.int32(0), params, optimizer.init(params), carry, jnp.zeros(2, jnp.int32))


def train_step(
    recipe: Recipe,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    carry_axes,
    microbatches: int = 1,
    teachers: Mapping[str, nn.Module] = MappingProxyType({}),
    untrained: Callable[[], Collection[str]] = tuple,
) -> Callable[[TrainState, Params, Batch], tuple[TrainState, Metrics]]:
    """The step of a recipe: (state, frozen parameters, global batch) -> (state, metrics), to be jitted.

    microbatches: the batch is cut into so many equal parts, whose gradients add up; saves memory, changes rounding.
    untrained: () -> paths of parameters that the loss does not read; they stay as they are, without decay.
    """
    objective = recipe.objective

    def step(state: TrainState, frozen: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        weights = objective.weights(batch)
        factors = {
            term: jnp.where(weights[term] > 0, factor / jnp.maximum(weights[term], 1e-30), 0.0)
            for term, factor in objective.coefficients(state.step).items()
        }
        rows = jnp.arange(batch_rows(batch))
        keys = row_keys(recipe.seed, state.step, rows)

        def loss(params, part, keys, carry):
            merged, bound = _bound(merge(params, frozen), teachers)
            terms, carry, counts = objective.loss(model, merged, part, carry, Moment(keys, True, state.step, bound))
            return sum(factors[term] * terms[term].sum for term in factors), (terms, carry, counts)

        gradient = jax.value_and_grad(loss, has_aux=True)
        (total, (terms, carry, counts)), gradients = accumulate(
            gradient, state.params, (batch, keys), state.carry, carry_axes, microbatches
        )
        norm = optax.global_norm(gradients)
        rate = learning_rate(recipe.schedule, state.step, recipe.steps)
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(
            clip(gradients, norm, recipe.optimizer.clip), state.opt_state, state.params, finite=finite
        )
        before, updates = dict(leaves(state.params)), dict(leaves(updates))
        still = untrained()
        params = nest({path: p if path in still else p - rate * updates[path] for path, p in before.items()})

        def keep(new, old):
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        bad = jnp.where(finite, 0, 1)
        skipped = jnp.stack([state.skipped[0] + bad, (state.skipped[1] + 1) * bad])
        new = TrainState(
            state.step + 1,
            keep(params, state.params),
            opt_state,
            keep(carry, state.carry),
            skipped,
        )
        return new, Metrics(total, Sums(terms, weights), counts, norm, rate, skipped)

    return step


def unread(
    objective: Objective,
    model: nn.Module,
    state: TrainState,
    frozen: Params,
    batch: Batch,
    teachers: Mapping[str, nn.Module] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Paths of the trained parameters that the loss does not depend on: no gradient ever reaches them. As
    `traced_loss`."""
    traced = traced_loss(objective, model, state.params, frozen, batch, state.carry, teachers).jaxpr
    read = partial_eval.dce_jaxpr(traced, [True])[1]
    return tuple(path for (path, _), is_read in zip(leaves(state.params), read, strict=False) if not is_read)


def traced_loss(
    objective: Objective,
    model: nn.Module,
    params: Params,
    frozen: Params,
    batch: Batch,
    carry,
    teachers: Mapping[str, nn.Module] = MappingProxyType({}),
) -> ClosedJaxpr:
    """The program of the loss in training: (params, frozen, batch, carry) -> the sum of its terms.

    The arguments are shapes and dtypes; nothing is computed.
    """

    def loss(params, frozen, batch, carry):
        keys = row_keys(0, 0, jnp.arange(batch_rows(batch)))
        merged, bound = _bound(merge(params, frozen), teachers)
        terms = objective.loss(model, merged, batch, carry, Moment(keys, True, 0, bound))[0]
        return sum(terms[term].sum for term in objective.coefficients(0))

    return jax.make_jaxpr(loss)(params, frozen, batch, carry)


def accumulate(gradient: Callable, params: Params, rows, carry, carry_axes, microbatches: int):
    """gradient(params, *rows, carry) summed over microbatches.

    rows: arrays [batch, ...]. A carry leaf with a 'batch' axis is cut like the rows; any other passes from one
    microbatch to the next.
    """
    if microbatches == 1:
        return gradient(params, *rows, carry)
    split, join = _by_rows(carry, carry_axes, microbatches)
    parts = jax.tree.map(lambda x: _cut(x, 0, microbatches), rows)
    rowwise, threaded = split(carry)

    def one(threaded, part_and_rowwise):
        part, rowwise = part_and_rowwise
        (total, (terms, carry, counts)), gradients = gradient(params, *part, join(rowwise, threaded))
        rowwise, threaded = split(carry, cut=False)
        return threaded, ((total, terms, counts, gradients), rowwise)

    def body(state, part_and_rowwise):
        threaded, so_far = state
        threaded, (new, rowwise) = one(threaded, part_and_rowwise)
        return (threaded, jax.tree.map(jnp.add, so_far, new)), rowwise

    shapes = jax.eval_shape(one, threaded, jax.tree.map(lambda x: x[0], (parts, rowwise)))[1][0]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (threaded, (total, terms, counts, gradients)), rowwise = jax.lax.scan(body, (threaded, zeros), (parts, rowwise))
    return (total, (terms, join(rowwise, threaded, whole=True), counts)), gradients


def _cut(x: Array, axis: int, parts: int) -> Array:
    """[.., batch, ..] -> [parts, .., batch / parts, ..]; every part takes each parts-th row, so that the rows of
    one device stay on it."""
    shape = (*x.shape[:axis], x.shape[axis] // parts, parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _joined(x: Array, axis: int) -> Array:
    """The inverse of `_cut`."""
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _by_rows(carry, carry_axes, parts: int):
    """How a carry is split into leaves that have rows and leaves that do not, and joined again."""
    structure = jax.tree.structure(carry)
    axes = [a.index("batch") if "batch" in a else None for a in jax.tree.leaves(carry_axes, is_leaf=is_axes)]

    def split(carry, cut=True):
        leaves = list(zip(jax.tree.leaves(carry), axes, strict=True))
        rowwise = [_cut(leaf, axis, parts) if cut else leaf for leaf, axis in leaves if axis is not None]
        return rowwise, [leaf for leaf, axis in leaves if axis is None]

    def join(rowwise, threaded, whole=False):
        rowwise, threaded = iter(rowwise), iter(threaded)
        leaves = []
        for axis in axes:
            leaf = next(threaded) if axis is None else next(rowwise)
            leaves.append(_joined(leaf, axis) if whole and axis is not None else leaf)
        return jax.tree.unflatten(structure, leaves)

    return split, join


class Evaluation(NamedTuple):
    """Sums over rows, and the objective's counts but for those that are one an example."""

    sums: Sums
    counts: dict[str, Array]


def evaluation_step(
    objective: Objective, model: nn.Module, seed: int, teachers: Mapping[str, nn.Module] = MappingProxyType({})
) -> Callable:
    """(params, frozen, rows of a batch, index, first, carry, trained) -> (Evaluation of these rows, their counts per
    example, carry).

    index, first: i32[], the number of the batch in the fixed set and of the first of the rows in it, which key their
    noise with the seed. No dropout.
    trained: i32[], how many updates were made.   To be jitted.
    """

    def step(params: Params, frozen: Params, batch: Batch, index: Array, first: Array, carry, trained: Array):
        keys = row_keys(seed, index, first + jnp.arange(batch_rows(batch)))
        merged, bound = _bound(merge(params, frozen), teachers)
        terms, carry, counts = objective.loss(model, merged, batch, carry, Moment(keys, False, trained, bound))
        examples = {name: counts.pop(name) for name in objective.per_example}
        return Evaluation(Sums(terms, objective.weights(batch)), counts), examples, carry

    return step


def _bound(params: Params, teachers: Mapping[str, nn.Module]) -> tuple[Params, dict[str, Bound]]:
    """(the model's own parameters, each teacher with its)."""
    own = {name: leaf for name, leaf in params.items() if name != TEACHERS}
    return own, {name: Bound(name, module, params[TEACHERS][name]) for name, module in teachers.items()}


def batch_rows(batch: Batch) -> int:
    """Rows of a batch."""
    return next(iter(batch.values())).shape[0]


def merge(params: Params, frozen: Params) -> Params:
    """One nested dict of the trained and the frozen parameters."""
    if not frozen:
        return params
    merged = dict(frozen)
    for key, value in params.items():
        merged[key] = merge(value, frozen[key]) if isinstance(value, dict) and key in frozen else value
    return merged
