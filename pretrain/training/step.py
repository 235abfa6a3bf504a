"""The train step and the evaluation step of a task, and the FLOPs of the train step."""

import functools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from models.attention.mask import OF_PATTERN, PAIRS
from models.core.noise import row_keys
from models.core.parameters import Params, leaves, nest
from models.core.program import Program
from models.core.sharding import placed_by
from models.families.registry import family_of
from pretrain.lora import merged
from pretrain.objectives.objective import TEACHERS, Batch, Bound, Moment, Objective, Phase, Sums, Task, scope, shapes_of
from pretrain.optimizers import clip, with_weights
from pretrain.recipe import Recipe, every_task, same_programs, schedule_in, tasks_of
from pretrain.schedules import Numbers, learning_rate
from pretrain.storage.checkpoints import TrainState
from pretrain.training.assembly import (
    Assembly,
    assemble,
    frozen_in,
    frozen_layers,
    initial_carry,
    merge,
    of_task,
    optimizer_in,
    parameter_shapes,
    split,
    split_frozen,
    transformation_in,
)
from pretrain.training.sparse_rows import rows_read
from tpu.flops import flops
from tpu.rules import is_axes


class Metrics(NamedTuple):
    """Metrics of one step: loss, sums of its terms, the objective's counts, gradient norm, learning rate, skips."""

    loss: Array
    sums: Sums
    counts: dict[str, Array]
    gradient_norm: Array
    learning_rate: Array
    skipped: Array


class Given(NamedTuple):
    """Inputs of a train step from the recipe: one program serves all seeds, rates and lengths of runs.

    seed: u32[].
    """

    seed: Array
    rate: Numbers


def given_in(recipe: Recipe, index: int) -> Given:
    """Return these inputs for a phase."""
    return Given(np.uint32(recipe.seed), schedule_in(recipe, index)[1])


def initial_state(assembly: Assembly, params: Params, phase: int = 0) -> tuple[TrainState, Params]:
    """Return (state before the first step of a phase, frozen parameters)."""
    trained, frozen = split_frozen(params, assembly.recipe)
    carry, _ = initial_carry(assembly, phase)
    return TrainState(
        jnp.int32(0), trained, first_moments(assembly, trained, phase), carry, jnp.zeros(2, jnp.int32)
    ), frozen


def first_moments(assembly: Assembly, params: Params, phase: int) -> optax.OptState:
    """Make the optimizer state for a phase with other trained parameters or another optimizer."""
    return transformation_in(assembly, phase).init(split(params, frozen_in(assembly.recipe, phase))[0])


def train_step(
    assembly: Assembly,
    carry_axes,
    microbatches: int = 1,
    phase: int = 0,
    task: Task | None = None,
    untrained: Callable[[], Collection[str]] = tuple,
) -> Callable[[TrainState, Params, Batch, Given], tuple[TrainState, Metrics]]:
    """Return a task's train step, to be jitted: (state, frozen parameters, global batch, given) -> (state, metrics).

    task: by default the phase's only one.   microbatches: number of equal parts of the batch whose gradients are
    accumulated; saves memory and changes only rounding.   untrained: () -> paths of parameters that no loss of the
    phase reads; they never change, not even by decay. Parameters that only other tasks read have a gradient of 0 here.
    """
    recipe, model, optimizer = assembly.recipe, assembly.model, transformation_in(assembly, phase)
    this_phase, task = recipe.phases[phase], task or tasks_of(recipe, recipe.phases[phase])[0]
    objective, (schedule, _) = task.objective, schedule_in(recipe, phase)
    frozen_paths, settings = frozen_in(recipe, phase), optimizer_in(recipe, phase)

    def step(state: TrainState, frozen: Params, batch: Batch, given: Given) -> tuple[TrainState, Metrics]:
        weights = objective.weights(batch)
        factors = _factors(objective.coefficients(state.step), weights)
        keys = row_keys(given.seed, state.step, jnp.arange(batch_rows(batch)))
        moving, held = split(state.params, frozen_paths)
        read = rows_read(assembly.table, batch, optimizer, moving, state.opt_state)
        trained, moments = read.gathered()

        def loss(params, part, keys, carry):
            whole = merge(read.in_tables(params), merge(held, frozen))
            whole, taught = bound(whole, objective, assembly.teachers)
            terms, carry, counts = objective.loss(model, whole, part, carry, Moment(keys, True, state.step, taught))
            return sum(factors[term] * terms[term].sum for term in factors), (terms, carry, counts)

        gradient = jax.value_and_grad(loss, has_aux=True)
        (total, (terms, carry, counts)), gradients = accumulate(
            gradient, trained, (batch, keys), of_task(this_phase, task, state.carry), carry_axes, microbatches
        )
        gradients = _without_layers(gradients, frozen_paths)
        norm = optax.global_norm(gradients)
        rate = learning_rate(schedule, given.rate, state.step)
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        updates, moments = optimizer.update(clip(gradients, norm, settings.clip), moments, trained, finite=finite)
        params = _moved(trained, _without_layers(updates, frozen_paths), rate, untrained())
        moments = with_weights(settings, moments, params, finite)

        def keep(new, old):
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        bad = jnp.where(finite, 0, 1)
        skipped = jnp.stack([state.skipped[0] + bad, (state.skipped[1] + 1) * bad])
        new = TrainState(
            state.step + 1,
            *read.put_back((keep(params, trained), moments)),
            keep(state.carry | {task.name: carry} if this_phase.tasks else carry, state.carry),
            skipped,
        )
        new = new._replace(params=merge(new.params, held))
        return new, Metrics(total, Sums(terms, weights), counts, norm, rate, skipped)

    return step


def _factors(coefficients: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """Compute the factor of each term's sum: c_k / W_k, or 0 if the batch has nothing of that term."""
    return {
        term: jnp.where(weights[term] > 0, factor / jnp.maximum(weights[term], 1e-30), 0.0)
        for term, factor in coefficients.items()
    }


def _moved(params: Params, updates: Params, rate: Array, unchanged: Collection[str]) -> Params:
    """Apply an update, except to the paths in `unchanged`."""
    flat = dict(leaves(updates))
    return nest({path: p if path in unchanged else p - rate * flat[path] for path, p in leaves(params)})


def _without_layers(updates: Params, frozen: Collection[str]) -> Params:
    """Set gradients or updates of frozen layers to 0."""
    flat = dict(leaves(updates))
    for path, leaf in flat.items():
        for layers in frozen_layers(path, frozen):
            flat[path] = leaf = leaf.at[layers].set(0.0)
    return nest(flat)


def accumulate(gradient: Callable, params: Params, rows, carry, carry_axes, microbatches: int):
    """Sum gradient(params, *rows, carry) over microbatches.   rows: arrays [batch, ...]. A carry leaf with a 'batch'
    axis is split like the rows; others pass through microbatches."""
    if microbatches == 1:
        return gradient(params, *rows, carry)

    def in_rows(change: Callable, *carries):
        """Map leaves with rows by change(their axis, leaves of the carries); take other leaves of the last carry."""
        leaf = lambda axes, *values: change(axes.index("batch"), *values) if "batch" in axes else values[-1]
        return jax.tree.map(leaf, carry_axes, *carries, is_leaf=is_axes)

    def one(cut, number, part):
        here = in_rows(lambda axis, leaf: leaf[number], cut)
        (total, (terms, here, counts)), gradients = gradient(params, *part, here)
        return in_rows(lambda axis, leaf, new: leaf.at[number].set(new), cut, here), (total, terms, counts, gradients)

    def body(state, number_and_part):
        cut, new = one(state[0], *number_and_part)
        return (cut, jax.tree.map(jnp.add, state[1], new)), None

    parts = jax.tree.map(lambda x: _cut(x, 0, microbatches), rows)
    cut = in_rows(lambda axis, leaf: _cut(leaf, axis, microbatches), carry)
    _, shapes = jax.eval_shape(one, cut, 0, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (cut, so_far), _ = jax.lax.scan(body, (cut, zeros), (jnp.arange(microbatches), parts))
    total, terms, counts, gradients = so_far
    return (total, (terms, in_rows(lambda axis, leaf: _joined(leaf, axis), cut), counts)), gradients


def _cut(x: Array, axis: int, parts: int) -> Array:
    """Split [.., batch, ..] -> [parts, .., batch / parts, ..]; each part takes every parts-th row, in its place."""
    shape = (*x.shape[:axis], x.shape[axis] // parts, parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _joined(x: Array, axis: int) -> Array:
    """Invert `_cut`."""
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def evaluation_step(
    objective: Objective, model: nn.Module, seed: int, teachers: Mapping[str, nn.Module] = MappingProxyType({})
) -> Callable:
    """Return the evaluation step, to be jitted: (params, frozen, rows, index, first, carry, trained) -> ((Sums of these
    rows, the objective's summed counts), its counts per example, carry).

    index, first: i32[], index of the batch in the fixed set and of the first row in it; they key the rows' noise with
    the seed. There is no dropout.   trained: i32[], number of updates so far.
    """

    def step(params: Params, frozen: Params, batch: Batch, index: Array, first: Array, carry, trained: Array):
        keys = row_keys(seed, index, first + jnp.arange(batch_rows(batch)))
        whole, taught = bound(merge(params, frozen), objective, teachers)
        terms, carry, counts = objective.loss(model, whole, batch, carry, Moment(keys, False, trained, taught))
        examples = {name: counts.pop(name) for name in objective.per_example}
        return (Sums(terms, objective.weights(batch)), counts), examples, carry

    return step


def bound(params: Params, objective: Objective, teachers: Mapping[str, nn.Module]) -> tuple[Params, dict[str, Bound]]:
    """Return (the model's parameters, teachers that the objective needs with their parameters)."""
    own = merged({name: leaf for name, leaf in params.items() if name != TEACHERS})
    return own, {name: Bound(name, teachers[name], params[TEACHERS][name]) for name in objective.teachers}


def batch_rows(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return next(iter(batch.values())).shape[0]


def traced_loss(recipe: Recipe, phase: Phase, task: Task) -> ClosedJaxpr:
    """Trace a task's training loss: (params, frozen, batch, carry) -> the sum of its terms. The trace has no mesh, and
    attention computes all pairs. Nothing is computed."""
    return _traced_loss(same_programs(recipe), phase, task)


@functools.lru_cache(maxsize=8)
def _traced_loss(recipe: Recipe, phase: Phase, task: Task) -> ClosedJaxpr:
    assembly, objective = assemble(recipe, Program(attention="dense")), task.objective

    def loss(params, frozen, batch, carry):
        keys = row_keys(0, 0, jnp.arange(batch_rows(batch)))
        whole, taught = bound(merge(params, frozen), objective, assembly.teachers)
        terms = objective.loss(assembly.model, whole, batch, carry, Moment(keys, True, 0, taught))[0]
        return sum(terms[term].sum for term in objective.coefficients(0))

    carry = jax.eval_shape(lambda: objective.carry(assembly.model, phase, train=True)[0])
    params = split_frozen(parameter_shapes(recipe), recipe)
    with placed_by(None):
        return jax.make_jaxpr(loss)(*params, shapes_of(objective.spec(phase), phase.batch_size), carry)


@functools.lru_cache
def unread(recipe: Recipe, index: int) -> tuple[str, ...]:
    """List the paths of parameters that no task of a phase reads, and that no gradient reaches."""
    phase, paths = recipe.phases[index], [path for path, _ in leaves(split_frozen(parameter_shapes(recipe), recipe)[0])]
    used: set[str] = set()
    for task in tasks_of(recipe, phase):
        read = partial_eval.dce_jaxpr(traced_loss(recipe, phase, task).jaxpr, [True])[1]
        used |= {path for path, is_read in zip(paths, read, strict=False) if is_read}
    return tuple(path for path in paths if path not in used)


@functools.lru_cache
def model_flops(recipe: Recipe, phase: Phase, task: Task | None = None) -> float:
    """Count the FLOPs of the operations that a task's traced loss depends on, and of its gradient. Attention counts the
    share of pairs in `Family.seen`, relative attention all pairs. The backward pass costs two forward passes, since the
    gradient of a product is two products of its size; a teacher has no backward pass.

    task: by default the phase's only one."""
    traced = traced_loss(recipe, phase, task or tasks_of(recipe, phase)[0])
    taught = {scope(teacher.name): teacher.model for teacher in recipe.teachers}

    def counted_as(where: str) -> float:
        passes, model = next(((1, model) for name, model in taught.items() if name in where), (3, recipe.model))
        if PAIRS not in where:
            return passes
        family = family_of(model)
        seen = (OF_PATTERN in where and family.seen_by_pattern) or family.seen
        return passes * seen(model, phase)

    needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    return flops(traced.replace(jaxpr=needed), {}, counted_as).total


def mean_flops(recipe: Recipe) -> float:
    """Average `model_flops` over a run's steps, to choose its mesh. Tasks of `Phase.rates` count equally."""
    total = 0.0
    for _, phase, task in every_task(recipe):
        rates = sum(other.rate for other in tasks_of(recipe, phase))
        total += phase.share * task.rate / rates * model_flops(recipe, phase, task)
    return total
