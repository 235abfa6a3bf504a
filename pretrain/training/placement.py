"""A recipe on a mesh: what lies where in each phase, and its programs. Made once; all that trains reads it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from models.core.parameters import Params, count
from models.core.program import Program
from models.core.sharding import placed_by
from pretrain.objectives.objective import Objective
from pretrain.objectives.phase import Phase, Task
from pretrain.recipe import Recipe, tasks_of
from pretrain.state import TrainState
from pretrain.training.assembly import Assembly, all_parameters, parameter_shapes, transformation_in
from pretrain.training.attention_choice import for_evaluation
from pretrain.training.step import Given, evaluation_step, first_carry, first_moments, given_in, train_step
from pretrain.training.traced import mean_flops, unread
from pretrain.training.trained import check_layers, frozen_in, merge, split, split_frozen
from tpu.mesh import Load, load_on, mesh_shape
from tpu.rules import activation_rules, carry_shardings, divisor_of_fsdp, parameter_shardings, replicated, rows
from tpu.xla import compiler_options, matmul_precision, small_product_options

SMALL = 20_000_000  # parameters, up to which a model's products are small for a CPU
# Limits on what is evaluated at once: tokens per device, few beside those of a train step, and rows over all devices.
EVALUATED_TOKENS, EVALUATED_ROWS = 1 << 13, 1024
EVALUATION_SEED = 20_181_011  # the same held-out rows and noise for every run, whatever its own seed


class Jitted(NamedTuple):
    """A step.   run: jitted, later compiled.   arguments: its arguments as shapes, dtypes and shardings.
    options: XLA's that it was jitted with."""

    run: Callable
    arguments: tuple
    options: Mapping[str, str | bool]


class Stage(NamedTuple):
    """A task of a phase on a mesh; what is not of the task alone is the same in all of the phase.

    state, frozen: the train state in this phase and the frozen parameters as shapes, dtypes and shardings.
    train: (state, frozen, batch, given) -> (state, metrics); the old state is given up.
    evaluate: `step.evaluation_step`, of `evaluated_rows` of a batch.
    untrained: () -> paths of the parameters that the task's loss does not read.
    first_carry, first_evaluation_carry: () -> the carry before the phase's first batch, the task's before its first in
    evaluation, jitted.   first_moments: parameters -> the optimiser's state before the phase, jitted.
    """

    assembly: Assembly
    index: int
    task: Task
    mesh: Mesh
    state: TrainState
    frozen: Params
    untrained: Callable[[], tuple[str, ...]]
    train: Jitted
    evaluate: Jitted
    evaluated_rows: int
    first_carry: Callable
    first_moments: Callable
    first_evaluation_carry: Callable

    @property
    def phase(self) -> Phase:
        return self.assembly.recipe.phases[self.index]

    @property
    def title(self) -> str:
        """As the log and a plan call it."""
        phase = f"phase {self.index + 1} of {len(self.assembly.recipe.phases)}"
        return f"{phase}, task {self.task.name}" if self.task.name else phase


def stages(assembly: Assembly, mesh: Mesh, microbatches: int = 1, shapes: Params | None = None) -> list[Stage]:
    """Each task of each phase on a mesh; only shapes are traced, nothing is computed. UserError if the mesh misfits.

    shapes: the `parameter_shapes`, where they are known.
    """
    shapes = parameter_shapes(assembly) if shapes is None else shapes
    check_layers(assembly.recipe, shapes)
    everything = parameter_shardings(all_parameters(assembly.recipe), shapes, mesh)
    trained, frozen = split_frozen(jax.tree.map(_placed, shapes, everything), assembly.recipe)
    made = []
    for index in range(len(assembly.recipe.phases)):
        made += _of_phase(assembly, index, mesh, microbatches, trained, frozen)
    return made


def of_phase(made: Sequence[Stage], index: int) -> dict[str, Stage]:
    """The stages of a phase, by the names of their tasks."""
    return {stage.task.name: stage for stage in made if stage.index == index}


def load_of(recipe: Recipe, shapes: Params, devices: list[jax.Device], memory: float | None) -> Load:
    """What devices with so much memory have to do for a recipe, by which its mesh is chosen.

    shapes: the `parameter_shapes`.
    """
    trained, divisor = count(split_frozen(shapes, recipe)[0]), divisor_of_fsdp(all_parameters(recipe), shapes)
    return load_on(devices, trained, memory, mean_flops(recipe), divisor)


def shardings(tree: Any) -> Any:
    """The shardings of what a stage says is placed."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def place_parameters(params: Params, stage: Stage) -> Params:
    """Parameters that every host has whole, some of a stage's, on a mesh: a device is given only its part."""

    everything = merge(stage.state.params, stage.frozen)
    return jax.tree.map(_place_whole, params, {name: everything[name] for name in params})


def _place_whole(array: np.ndarray, like: jax.ShapeDtypeStruct) -> Array:
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])


def place_given(stage: Stage) -> Given:
    """What a stage's steps are given beside batches, on its mesh."""
    given = given_in(stage.assembly.recipe, stage.index)
    return jax.tree.map(_place_whole, given, stage.train.arguments[-1])


def _of_phase(
    assembly: Assembly, index: int, mesh: Mesh, microbatches: int, params: Params, frozen: Params
) -> list[Stage]:
    recipe, everywhere = assembly.recipe, replicated(mesh)
    tasks = tasks_of(recipe, recipe.phases[index])
    moments, opt_state = _moments(assembly, index, mesh, params)
    carries = {task.name: _carry(assembly, task, recipe.phases[index], mesh, train=True) for task in tasks}
    alone = len(tasks) == 1
    carry = carries[tasks[0].name].placed if alone else {name: of.placed for name, of in carries.items()}
    first = jax.jit(lambda: first_carry(assembly, index), out_shardings=shardings(carry))
    scalar = jax.ShapeDtypeStruct((), np.int32, sharding=everywhere)
    skipped = jax.ShapeDtypeStruct((2,), np.int32, sharding=everywhere)
    state = TrainState(scalar, params, opt_state, carry, skipped)
    made = []
    for task in tasks:
        step = partial(train_step, assembly, carries[task.name].axes, microbatches, index, task)
        made.append(_stage(assembly, index, task, mesh, microbatches, state, frozen, step, first, moments))
    return made


def _stage(
    assembly: Assembly,
    index: int,
    task: Task,
    mesh: Mesh,
    microbatches: int,
    state: TrainState,
    frozen: Params,
    train_step_of: Callable,
    first: Callable,
    moments: Callable,
) -> Stage:
    recipe, phase, objective = assembly.recipe, assembly.recipe.phases[index], task.objective
    evaluated_rows = _evaluated_rows(objective, phase, mesh, microbatches)
    of_evaluation = dataclasses.replace(phase, batch_size=evaluated_rows)
    evaluation_carry = _carry(assembly, task, of_evaluation, mesh, train=False)
    batch, evaluated_batch = (_batch(objective, one, mesh) for one in (phase, of_evaluation))
    several = len(tasks_of(recipe, phase)) > 1

    @functools.cache
    def untrained() -> tuple[str, ...]:
        model = assembly.model.clone(program=Program())  # the form that is traced fastest
        carry = state.carry[task.name] if several else state.carry
        given = jax.tree.map(_shape, (state.params, frozen, batch, carry))
        with placed_by(None):
            return unread(objective, model, *given, assembly.teachers)

    step = train_step_of(untrained)
    step = _on_own_carry(step, task.name) if several else step
    options_of = small_product_options if count(merge(state.params, frozen)) <= SMALL else compiler_options
    options = options_of(mesh, looped=assembly.model.program.depth == "scan")
    everywhere = replicated(mesh)
    train = jit_on(mesh, assembly, step, options, out_shardings=(shardings(state), everywhere), donate_argnums=0)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=everywhere), given_in(recipe, index))
    evaluated = for_evaluation(assembly, index, task, mesh)
    evaluation = evaluation_step(objective, evaluated.model, EVALUATION_SEED, assembly.teachers)
    # The carry comes back as it lies in the first one.
    outputs = (everywhere, everywhere, shardings(evaluation_carry.placed))
    evaluate = jit_on(mesh, evaluated, evaluation, options, out_shardings=outputs)
    number = jax.ShapeDtypeStruct((), np.int32)
    evaluated_on = (state.params, frozen, evaluated_batch, number, number, evaluation_carry.placed, number)
    return Stage(
        assembly,
        index,
        task,
        mesh,
        state,
        frozen,
        untrained,
        train=Jitted(train, (state, frozen, batch, given), options),
        evaluate=Jitted(evaluate, evaluated_on, options),
        evaluated_rows=evaluated_rows,
        first_carry=first,
        first_moments=moments,
        first_evaluation_carry=evaluation_carry.first,
    )


def _on_own_carry(step: Callable, name: str) -> Callable:
    """A task's step in a phase of several, whose state has a carry for each by name."""

    def of_state(state: TrainState, *others):
        after, metrics = step(state._replace(carry=state.carry[name]), *others)
        return after._replace(carry=state.carry | {name: after.carry}), metrics

    return of_state


def jit_on(mesh: Mesh, assembly: Assembly, step: Callable, options: Mapping[str, str | bool], **how) -> Callable:
    """A step jitted for a mesh, with these options of the compiler."""

    def placed(*arguments):
        with placed_by(activation_rules(mesh)), matmul_precision(assembly.model.program.dtype):
            return step(*arguments)

    return jax.jit(placed, compiler_options=options, **how)


def _evaluated_rows(objective: Objective, phase: Phase, mesh: Mesh, microbatches: int) -> int:
    """How many rows of a batch an evaluation computes at once: a divisor that the mesh cuts evenly, a microbatch or
    fewer; whole batches where rows are compared with one another."""
    if not objective.rowwise:
        return phase.batch_size
    parts = mesh_shape(mesh).batch_parts
    most = min(phase.batch_size // microbatches, EVALUATED_ROWS, parts * EVALUATED_TOKENS // phase.length)
    return max((n for n in range(parts, most + 1, parts) if phase.batch_size % n == 0), default=parts)


def _batch(objective: Objective, phase: Phase, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((phase.batch_size, *shape), dtype, sharding=rows(mesh))
        for name, (shape, dtype) in objective.spec(phase).items()
    }


class Carry(NamedTuple):
    """first: makes a task's first one, jitted.   placed: as shapes, dtypes and shardings.   axes: of its leaves."""

    first: Callable
    placed: Any
    axes: Any


def _carry(assembly: Assembly, task: Task, phase: Phase, mesh: Mesh, train: bool) -> Carry:
    """Nothing is computed: a memory of many rows fits on no single device."""
    axes = []

    def make():
        carry, of_carry = task.objective.carry(assembly.model, phase, train)
        axes.append(of_carry)
        return carry

    shapes = jax.eval_shape(make)
    where = carry_shardings(axes[0], mesh)
    return Carry(jax.jit(make, out_shardings=where), jax.tree.map(_placed, shapes, where), axes[0])


def _moments(assembly: Assembly, index: int, mesh: Mesh, params: Params) -> tuple[Callable, Any]:
    """(parameters -> the optimiser's state before a phase, jitted; that as shapes, dtypes and shardings)."""

    def make(params):
        return first_moments(assembly, params, index)

    shapes, everywhere = jax.eval_shape(make, params), replicated(mesh)
    where = optax.tree_utils.tree_map_params(
        transformation_in(assembly, index),
        lambda _, sharding: sharding,
        shapes,
        split(shardings(params), frozen_in(assembly.recipe, index))[0],
        transform_non_params=lambda _: everywhere,
    )
    return jax.jit(make, out_shardings=where), jax.tree.map(_placed, shapes, where)


def _shape(placed: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(placed.shape, placed.dtype)


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
