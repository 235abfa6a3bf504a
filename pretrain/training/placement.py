"""A recipe on a mesh: what lies where in each phase, and its programs. Made once; all that trains reads it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from models.core.parameters import Params, count
from models.core.program import Program
from models.core.sharding import placed_by
from pretrain.objectives.phase import Phase
from pretrain.recipe import Recipe
from pretrain.state import TrainState
from pretrain.training.assembly import Assembly, all_parameters, mean_flops, parameter_shapes, split_frozen
from pretrain.training.attention_choice import for_evaluation
from pretrain.training.step import evaluation_step, merge, new_state, train_step, unread
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
    """A phase of a recipe on a mesh.

    state, frozen: the train state in this phase and the frozen parameters as shapes, dtypes and shardings.
    train: (state, frozen, batch) -> (state, metrics); the old state is given up.
    evaluate: `step.evaluation_step`, of `evaluated_rows` of a batch.
    untrained: () -> paths of the parameters that the phase's loss does not read.
    first_carry, first_evaluation_carry: () -> the objective's carry before the first batch, jitted.
    """

    assembly: Assembly
    index: int
    mesh: Mesh
    state: TrainState
    frozen: Params
    untrained: Callable[[], tuple[str, ...]]
    train: Jitted
    evaluate: Jitted
    evaluated_rows: int
    first_carry: Callable
    first_evaluation_carry: Callable

    @property
    def phase(self) -> Phase:
        return self.assembly.recipe.phases[self.index]


def stages(assembly: Assembly, mesh: Mesh, microbatches: int = 1, shapes: Params | None = None) -> list[Stage]:
    """Each phase of a recipe on a mesh; only shapes are traced, nothing is computed. UserError if the mesh misfits.

    shapes: the `parameter_shapes`, where they are known.
    """
    shapes = parameter_shapes(assembly) if shapes is None else shapes
    trained, frozen = split_frozen(shapes, assembly.recipe)
    state = jax.eval_shape(lambda params: new_state(params, assembly.optimizer, {}), trained)
    placed, held = _shardings(assembly, state, frozen, mesh)
    state, frozen = jax.tree.map(_placed, (state, frozen), (placed, held))
    return [_stage(assembly, index, mesh, microbatches, state, frozen) for index in range(len(assembly.recipe.phases))]


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

    def place(array, like):
        return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])

    everything = merge(stage.state.params, stage.frozen)
    return jax.tree.map(place, params, {name: everything[name] for name in params})


def _stage(assembly: Assembly, index: int, mesh: Mesh, microbatches: int, state: TrainState, frozen: Params) -> Stage:
    """state: without a carry."""
    recipe, phase = assembly.recipe, assembly.recipe.phases[index]
    first, carry, axes = _carry(assembly, phase, mesh, train=True)
    evaluated_rows = _evaluated_rows(recipe, phase, mesh, microbatches)
    of_evaluation = dataclasses.replace(phase, batch_size=evaluated_rows)
    first_evaluation, evaluation_carry, _ = _carry(assembly, of_evaluation, mesh, train=False)
    state = state._replace(carry=carry)
    batch, evaluated_batch = (_batch(recipe, one, mesh) for one in (phase, of_evaluation))

    @functools.cache
    def untrained() -> tuple[str, ...]:
        model = assembly.model.clone(program=Program())  # the form that is traced fastest
        with placed_by(None):
            return unread(recipe.objective, model, *jax.tree.map(_shape, (state, frozen, batch)), assembly.teachers)

    step = train_step(recipe, assembly.model, assembly.optimizer, axes, microbatches, assembly.teachers, untrained)
    outputs = (shardings(state), replicated(mesh))
    options_of = small_product_options if count(merge(state.params, frozen)) <= SMALL else compiler_options
    options = options_of(mesh, looped=assembly.model.program.depth == "scan")
    train = jit_on(mesh, assembly, step, options, out_shardings=outputs, donate_argnums=0)
    evaluated = for_evaluation(assembly, index, mesh)
    evaluation = evaluation_step(recipe.objective, evaluated.model, EVALUATION_SEED, assembly.teachers)
    # The carry comes back as it lies in the first one.
    outputs = (replicated(mesh), replicated(mesh), shardings(evaluation_carry))
    evaluate = jit_on(mesh, evaluated, evaluation, options, out_shardings=outputs)
    number = jax.ShapeDtypeStruct((), np.int32)
    return Stage(
        assembly,
        index,
        mesh,
        state,
        frozen,
        untrained,
        train=Jitted(train, (state, frozen, batch), options),
        evaluate=Jitted(
            evaluate, (state.params, frozen, evaluated_batch, number, number, evaluation_carry, number), options
        ),
        evaluated_rows=evaluated_rows,
        first_carry=first,
        first_evaluation_carry=first_evaluation,
    )


def jit_on(mesh: Mesh, assembly: Assembly, step: Callable, options: Mapping[str, str | bool], **how) -> Callable:
    """A step jitted for a mesh, with these options of the compiler."""

    def placed(*arguments):
        with placed_by(activation_rules(mesh)), matmul_precision(assembly.model.program.dtype):
            return step(*arguments)

    return jax.jit(placed, compiler_options=options, **how)


def _evaluated_rows(recipe: Recipe, phase: Phase, mesh: Mesh, microbatches: int) -> int:
    """How many rows of a batch an evaluation computes at once: a divisor that the mesh cuts evenly, a microbatch or
    fewer; whole batches where rows are compared with one another."""
    if not recipe.objective.rowwise:
        return phase.batch_size
    parts = mesh_shape(mesh).batch_parts
    most = min(phase.batch_size // microbatches, EVALUATED_ROWS, parts * EVALUATED_TOKENS // phase.length)
    return max((n for n in range(parts, most + 1, parts) if phase.batch_size % n == 0), default=parts)


def _batch(recipe: Recipe, phase: Phase, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((phase.batch_size, *shape), dtype, sharding=rows(mesh))
        for name, (shape, dtype) in recipe.objective.spec(phase).items()
    }


def _carry(assembly: Assembly, phase: Phase, mesh: Mesh, train: bool) -> tuple[Callable, Any, Any]:
    """(makes the first carry, jitted; the carry as shapes, dtypes and shardings; its axes).

    Nothing is computed: a memory of many rows fits on no single device.
    """
    axes = []

    def make():
        carry, of_carry = assembly.recipe.objective.carry(assembly.model, phase, train)
        axes.append(of_carry)
        return carry

    shapes = jax.eval_shape(make)
    where = carry_shardings(axes[0], mesh)
    first = jax.jit(make, out_shardings=where)
    return first, jax.tree.map(_placed, shapes, where), axes[0]


def _shardings(assembly: Assembly, state: TrainState, frozen: Params, mesh: Mesh) -> tuple[TrainState, Params]:
    """(of a state without a carry, of the frozen parameters): a sharding for each array."""
    everything = parameter_shardings(all_parameters(assembly.recipe), merge(state.params, frozen), mesh)
    trained, held = split_frozen(everything, assembly.recipe)
    everywhere = replicated(mesh)
    moments = optax.tree_utils.tree_map_params(
        assembly.optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        trained,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(everywhere, trained, moments, {}, everywhere), held


def _shape(placed: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(placed.shape, placed.dtype)


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
