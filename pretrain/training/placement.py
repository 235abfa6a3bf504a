"""Place a recipe on a mesh: the shardings and programs of each phase, for runs, plans and commands that read a run.

On accelerators all programs are compiled before the first step, so that one which does not compile or fit fails early.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipelines.errors import UserError
from models.core.parameters import Params, count
from models.core.program import Program
from models.core.sharding import placed_by
from pretrain.objectives.objective import Objective, Phase, Task, shapes_of
from pretrain.options import How
from pretrain.recipe import Recipe, every_task
from pretrain.storage.checkpoints import TrainState, checkpoint_bytes
from pretrain.training.assembly import (
    Assembly,
    all_parameters,
    assemble,
    check_frozen,
    frozen_in,
    in_phase,
    initial_carry,
    merge,
    of_task,
    parameter_shapes,
    split,
    split_frozen,
    transformation_in,
)
from pretrain.training.attention_choice import chosen_program, for_evaluation, with_kernels
from pretrain.training.step import Given, evaluation_step, first_moments, given_in, mean_flops, train_step, unread
from tpu.generations import GIB
from tpu.mesh import Load, MeshShape, choose_mesh, divided_by, load_on, mesh_shape
from tpu.rules import (
    activation_rules,
    carry_shardings,
    divisor_of_fsdp,
    parameter_shardings,
    replicated,
    rows,
    shard_bytes,
)
from tpu.xla import compiler_options, matmul_precision, small_product_options

SMALL = 20_000_000  # models up to this many parameters have small matrix products for a CPU
# Limits of an evaluation step: tokens per device, few compared with a train step, and rows over all devices
EVALUATED_TOKENS, EVALUATED_ROWS = 1 << 13, 1024
EVALUATION_SEED = 20_181_011  # random seed of held-out rows and their noise, the same for every run
TRAIN, EVALUATE, CHECKPOINT = "train step", "evaluation", "checkpoint"
FIELDS = {TRAIN: "train", EVALUATE: "evaluate"}  # fields of a Stage
CURES = {
    TRAIN: "raise --microbatches, or try --remat full or a --mesh with more fsdp",
    EVALUATE: "try a --mesh with more fsdp",
}


class Jitted(NamedTuple):
    """A step.   run: jitted, later compiled.   arguments: shapes, dtypes and shardings.   options: of XLA."""

    run: Callable
    arguments: tuple
    options: Mapping[str, str | bool]


class Stage(NamedTuple):
    """One task of a phase on a mesh. Tasks of a phase share everything that does not depend on the task.

    state, frozen: the phase's train state and the frozen parameters as shapes, dtypes and shardings.
    train: (state, frozen, batch, given) -> (state, metrics); the old state is donated.
    evaluate: `step.evaluation_step` of `evaluated_rows` rows.
    untrained: () -> paths of the parameters that no loss of the phase reads.
    first_carry, first_evaluation_carry: () -> the carry before the phase's first batch, or before the task's first
    evaluation batch, jitted.   first_moments: parameters -> the optimizer state before the phase, jitted.
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
        """Name in the log and in plans."""
        phase = f"phase {self.index + 1} of {len(self.assembly.recipe.phases)}"
        return f"{phase}, task {self.task.name}" if self.task.name else phase


class Placed(NamedTuple):
    """A recipe on a mesh; nothing is allocated or compiled yet.   load: the work by which the mesh is chosen."""

    assembly: Assembly
    mesh: Mesh
    load: Load
    stages: list[Stage]

    def of(self, recipe: Recipe) -> "Placed":
        """Replace the recipe by one that has the same programs, without tracing or compiling them again."""
        assembly = self.assembly._replace(recipe=recipe)
        stages = [stage._replace(assembly=in_phase(assembly, stage.index)) for stage in self.stages]
        return self._replace(assembly=assembly, stages=stages)


def place(
    recipe: Recipe, how: How, devices: Sequence[jax.Device], memory: float | None, platform: str | None = None
) -> Placed:
    """Place a recipe on devices, with the mesh and program that the options choose or that fit best.   memory: bytes
    per device.   platform: of the devices, by default this machine's.   UserError if they do not fit."""
    load = load_of(recipe, devices, memory)
    mesh = choose_mesh(how.mesh, devices, load)
    check_batches(recipe, how.microbatches, mesh_shape(mesh))
    return place_on(recipe, mesh, chosen_program(recipe, how, mesh, platform), load, how.microbatches)


def place_on(recipe: Recipe, mesh: Mesh, program: Program, load: Load, microbatches: int = 1) -> Placed:
    """Place a recipe on a mesh, with a program."""
    assembly = with_kernels(assemble(recipe, program), mesh)
    with divided_by(mesh):
        return Placed(assembly, mesh, load, stages(assembly, mesh, microbatches))


def check_batches(recipe: Recipe, microbatches: int, shape: MeshShape) -> None:
    """Raise UserError unless a mesh divides every phase's microbatches evenly, and objectives allow them."""
    for _, _, task in every_task(recipe) if microbatches > 1 else ():
        if not task.objective.rowwise:
            raise UserError(
                f"--microbatches {microbatches}: {type(task.objective).__name__} compares all rows of a batch, which "
                "microbatches would split; leave it out, and use more devices or a smaller batch"
            )
    parts = microbatches * shape.batch_parts
    for index, phase in enumerate(recipe.phases):
        if phase.batch_size % parts:
            raise UserError(
                f"phases.{index}.batch_size={phase.batch_size}: is not a multiple of --microbatches {microbatches} x "
                f"the {shape.batch_parts} batch shards of the mesh {shape}; use a multiple of {parts} or another --mesh"
            )


def stages(assembly: Assembly, mesh: Mesh, microbatches: int = 1) -> list[Stage]:
    """Place each task of each phase on a mesh. UserError if the mesh or `frozen` does not fit the parameters."""
    shapes = parameter_shapes(assembly.recipe)
    check_frozen(assembly.recipe, shapes)
    sharded = parameter_shardings(all_parameters(assembly.recipe), shapes, mesh)
    trained, frozen = split_frozen(jax.tree.map(_placed, shapes, sharded), assembly.recipe)
    return [
        _stage(in_phase(assembly, index), index, task, mesh, microbatches, trained, frozen)
        for index, _, task in every_task(assembly.recipe)
    ]


def of_phase(stages: Sequence[Stage], index: int) -> dict[str, Stage]:
    """Return the stages of a phase, by the names of their tasks."""
    return {stage.task.name: stage for stage in stages if stage.index == index}


def any_task(stages: Sequence[Stage], index: int) -> Stage:
    """Return a stage of a phase, for what its tasks share."""
    return next(stage for stage in stages if stage.index == index)


def load_of(recipe: Recipe, devices: list[jax.Device], memory: float | None) -> Load:
    """Estimate the work of a recipe on devices with `memory` bytes each, by which its mesh is chosen."""
    shapes = parameter_shapes(recipe)
    trained, divisor = count(split_frozen(shapes, recipe)[0]), divisor_of_fsdp(all_parameters(recipe), shapes)
    flops = mean_flops(recipe) if len(devices) > 1 else 0.0  # of meshes of one device there is one
    return load_on(devices, trained, memory, flops, divisor)


def shardings(tree: Any) -> Any:
    """Return the shardings of a tree of placed shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def place_parameters(params: Params, stage: Stage) -> Params:
    """Put some of a stage's parameters, which every host has in full, on its mesh, to each device its shards."""

    everything = merge(stage.state.params, stage.frozen)
    return jax.tree.map(_place_whole, params, {name: everything[name] for name in params})


def _place_whole(array: np.ndarray, like: jax.ShapeDtypeStruct) -> Array:
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])


def place_given(stage: Stage) -> Given:
    """Put the inputs of a stage's train step besides batches on its mesh."""
    given = given_in(stage.assembly.recipe, stage.index)
    return jax.tree.map(_place_whole, given, stage.train.arguments[-1])


def _stage(
    assembly: Assembly, index: int, task: Task, mesh: Mesh, microbatches: int, params: Params, frozen: Params
) -> Stage:
    recipe, phase, objective = assembly.recipe, assembly.recipe.phases[index], task.objective
    untrained = partial(unread, recipe, index)
    everywhere = replicated(mesh)
    first_carry, carry, axes = _carry(lambda: initial_carry(assembly, index), mesh)
    moments_before, opt_state = _moments(assembly, index, mesh, params)
    seen, skipped = (jax.ShapeDtypeStruct(shape, np.int32, sharding=everywhere) for shape in ((), (2,)))
    state = TrainState(seen, params, opt_state, carry, skipped)
    evaluated_rows = _evaluated_rows(objective, phase, mesh, microbatches)
    evaluation_phase = dataclasses.replace(phase, batch_size=evaluated_rows)
    first_evaluated, evaluated_carry, _ = _carry(lambda: objective.carry(assembly.model, evaluation_phase, False), mesh)
    batch = shapes_of(objective.spec(phase), phase.batch_size, rows(mesh))
    evaluated_batch = shapes_of(objective.rows(phase).spec, evaluated_rows, rows(mesh))

    step = train_step(assembly, of_task(phase, task, axes), microbatches, index, task, untrained)
    options_of = small_product_options if count(merge(params, frozen)) <= SMALL else compiler_options
    options = options_of(mesh, looped=assembly.model.program.depth == "scan")
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=everywhere), given_in(recipe, index))
    evaluated = for_evaluation(assembly, index, task, mesh)
    evaluation = evaluation_step(objective, evaluated.model, EVALUATION_SEED, assembly.teachers)
    number = jax.ShapeDtypeStruct((), np.int32)
    run_step = jit_on(mesh, assembly, step, options, out_shardings=(shardings(state), everywhere), donate_argnums=0)
    train = Jitted(run_step, (state, frozen, batch, given), options)
    outputs = everywhere, everywhere, shardings(evaluated_carry)  # the carry keeps its shardings
    run_evaluation = jit_on(mesh, evaluated, evaluation, options, out_shardings=outputs)
    of_evaluation = (params, frozen, evaluated_batch, number, number, evaluated_carry, number)
    evaluate = Jitted(run_evaluation, of_evaluation, options)
    first = (first_carry, moments_before, first_evaluated)
    return Stage(assembly, index, task, mesh, state, frozen, untrained, train, evaluate, evaluated_rows, *first)


def jit_on(mesh: Mesh, assembly: Assembly, step: Callable, options: Mapping[str, str | bool], **how) -> Callable:
    """Jit a step for a mesh, with these compiler options."""

    def placed(*arguments):
        with placed_by(activation_rules(mesh)), matmul_precision(assembly.model.program.dtype):
            return step(*arguments)

    return jax.jit(placed, compiler_options=options, **how)


def _evaluated_rows(objective: Objective, phase: Phase, mesh: Mesh, microbatches: int) -> int:
    """Choose the number of rows of an evaluation step: at most a microbatch, a divisor of the batch size that the mesh
    divides evenly; the whole batch if the objective compares rows."""
    if not objective.rowwise:
        return phase.batch_size
    parts = mesh_shape(mesh).batch_parts
    of_tokens = parts * EVALUATED_TOKENS // objective.rows(phase).tokens
    most = min(phase.batch_size // microbatches, EVALUATED_ROWS, of_tokens)
    return max((n for n in range(parts, most + 1, parts) if phase.batch_size % n == 0), default=parts)


def _carry(make: Callable, mesh: Mesh) -> tuple[Callable, Any, Any]:
    """Return (jitted function that makes the first carry; its shapes, dtypes and shardings; its axes).   make: () ->
    (carry, axes); only traced, since a memory of many rows may not fit on one device."""
    axes = []

    def carry():
        value, axes_of_value = make()
        axes.append(axes_of_value)
        return value

    shapes = jax.eval_shape(carry)
    where = carry_shardings(axes[0], mesh)
    return jax.jit(carry, out_shardings=where), jax.tree.map(_placed, shapes, where), axes[0]


def _moments(assembly: Assembly, index: int, mesh: Mesh, params: Params) -> tuple[Callable, Any]:
    """Return (jitted: parameters -> the optimizer state before a phase; its shapes, dtypes and shardings)."""

    def make(params):
        return first_moments(assembly, params, index)

    shapes, everywhere = jax.eval_shape(make, params), replicated(mesh)
    where = optax.tree_utils.tree_map_params(
        transformation_in(assembly, index),
        fitted,
        shapes,
        split(shardings(params), frozen_in(assembly.recipe, index))[0],
        transform_non_params=lambda _: everywhere,
    )
    return jax.jit(make, out_shardings=where), jax.tree.map(_placed, shapes, where)


def fitted(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    """Shard a moment like its parameter, except along axes over which it is a mean."""
    spec = (*sharding.spec, *(None,) * (len(shape.shape) - len(sharding.spec)))
    kept = (None if size == 1 else axis for size, axis in zip(shape.shape, spec, strict=True))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def trace(stages: list[Stage], names: Sequence[str] = (TRAIN, EVALUATE)) -> None:
    """Trace the named programs, without compiling. UserError if the mesh does not divide activations evenly."""
    for stage in stages:
        with divided_by(stage.mesh):
            for program in (getattr(stage, FIELDS[name]) for name in names):
                program.run.trace(*program.arguments)


def compiles_ahead(mesh: Mesh) -> bool:
    """Return whether programs are compiled before the first step: on accelerators, where they are cached for the next
    start. A CPU compiles in seconds when a phase begins."""
    return mesh.devices.flat[0].platform != "cpu"


def compile_phases(stages: list[Stage], names: Mapping[int, list[str]], say: Callable[[str], None]) -> list[Stage]:
    """Compile the named programs (phase -> names) -> the stages with compiled programs.   say: called with progress
    messages.   UserError if a program does not fit into a device's memory."""
    stages = list(stages)
    for number, stage in enumerate(stages):
        if stage.index in names:
            say(f"compiling {stage.title}: {', '.join(names[stage.index])}")
            start = time.perf_counter()
            stages[number], needed = _compiled_stage(stage, names[stage.index])
            sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needed.items())
            say(f"compiled in {time.perf_counter() - start:.0f} s; GiB per device: {sizes}")
    return stages


def _compiled_stage(stage: Stage, wanted: list[str]) -> tuple[Stage, dict[str, int]]:
    """Compile programs -> (the stage with compiled programs; name -> bytes per device)."""
    needed = {}
    beside = {EVALUATE: shard_bytes(stage.state._replace(params=()))}  # in memory, but not an argument
    for name in wanted:
        program = getattr(stage, FIELDS[name])
        with no_memory(stage.index, name):
            compiled = program.run.lower(*program.arguments).compile()
        stage = stage._replace(**{FIELDS[name]: program._replace(run=compiled)})
        needed[name] = _bytes(compiled) + beside.get(name, 0)
    needed[CHECKPOINT] = shard_bytes(stage.train.arguments) + checkpoint_bytes(stage.state)
    capacity = (stage.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    for name, size in needed.items():
        if capacity and size > capacity:
            problem = f"needs {size / GIB:.2f} GiB, but a device has {capacity / GIB:.2f}"
            raise UserError(_too_large(stage.index, name, problem))
    return stage, needed


@contextlib.contextmanager
def no_memory(phase: int, name: str) -> Iterator[None]:
    """Turn a lack of memory in this context into a UserError that says how to use less."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(_too_large(phase, name, "does not fit a device's memory")) from error


def _bytes(compiled: jax.stages.Compiled) -> int:
    """Return the device memory of a program in bytes; outputs that alias an argument cost nothing."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes
    )


def _too_large(phase: int, name: str, problem: str) -> str:
    cure = CURES.get(name, CURES[EVALUATE])  # a checkpoint has the cure of an evaluation
    smaller = f"in another --workdir, a smaller phases.{phase}.batch_size"
    return f"phase {phase + 1}: the {name} {problem}; {cure} or, {smaller}"
