"""A recipe on a mesh: what lies where in each phase, and its programs. A run, a plan and all that reads a run's model
begin so. On accelerators all programs are compiled before the first step: what does not compile or fit must not wait
for its phase."""

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
    initial_carry,
    merge,
    of_task,
    parameter_shapes,
    split,
    split_frozen,
    transformation_in,
)
from pretrain.training.attention_choice import chosen_program, for_evaluation
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

SMALL = 20_000_000  # parameters, up to which a model's products are small for a CPU
# Limits on what is evaluated at once: tokens per device, few beside those of a train step, and rows over all devices.
EVALUATED_TOKENS, EVALUATED_ROWS = 1 << 13, 1024
EVALUATION_SEED = 20_181_011  # the same held-out rows and noise for every run, whatever its own seed
TRAIN, EVALUATE, CHECKPOINT = "train step", "evaluation", "checkpoint"
FIELDS = {TRAIN: "train", EVALUATE: "evaluate"}  # of a Stage
CURES = {
    TRAIN: "raise --microbatches, or try --remat full, a --mesh with more fsdp",
    EVALUATE: "try a --mesh with more fsdp",
}


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
    untrained: () -> paths of the parameters that no loss of the phase reads.
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


class Placed(NamedTuple):
    """A recipe on a mesh; nothing is allocated or compiled yet.   load: by which a mesh is chosen."""

    assembly: Assembly
    mesh: Mesh
    load: Load
    stages: list[Stage]

    def of(self, recipe: Recipe) -> "Placed":
        """A recipe of the same programs, which are not traced or compiled again."""
        assembly = self.assembly._replace(recipe=recipe)
        stages = [stage._replace(assembly=assembly) for stage in self.stages]
        return self._replace(assembly=assembly, stages=stages)


def place(
    recipe: Recipe, how: How, devices: Sequence[jax.Device], memory: float | None, platform: str | None = None
) -> Placed:
    """On these devices, which have so many bytes each, with the mesh and the program that are chosen or suit best.

    platform: of the devices, by default this machine's. UserError where that does not go together.
    """
    load = load_of(recipe, devices, memory)
    mesh = choose_mesh(how.mesh, devices, load)
    check_batches(recipe, how.microbatches, mesh_shape(mesh))
    return place_on(recipe, mesh, chosen_program(recipe, how, mesh, platform), load, how.microbatches)


def place_on(recipe: Recipe, mesh: Mesh, program: Program, load: Load, microbatches: int = 1) -> Placed:
    """On a mesh, with a program."""
    assembly = assemble(recipe, program)
    with divided_by(mesh):
        return Placed(assembly, mesh, load, stages(assembly, mesh, microbatches))


def check_batches(recipe: Recipe, microbatches: int, shape: MeshShape) -> None:
    """UserError unless a mesh of this shape cuts the microbatches of every phase evenly, and they change nothing."""
    for _, _, task in every_task(recipe) if microbatches > 1 else ():
        if not task.objective.rowwise:
            raise UserError(
                f"--microbatches {microbatches}: {type(task.objective).__name__} compares the rows of a batch with one "
                "another, of which a microbatch has few; leave it out, and take more devices or a smaller batch"
            )
    parts = microbatches * shape.batch_parts
    for index, phase in enumerate(recipe.phases):
        if phase.batch_size % parts:
            raise UserError(
                f"phases.{index}.batch_size={phase.batch_size} is not a multiple of --microbatches {microbatches} x "
                f"the {shape.batch_parts} parts of the mesh {shape}: choose a multiple of {parts}, or another --mesh"
            )


def stages(assembly: Assembly, mesh: Mesh, microbatches: int = 1) -> list[Stage]:
    """Each task of each phase on a mesh; only shapes are traced, nothing is computed. UserError if the mesh misfits, or
    `frozen` does not fit the parameters."""
    shapes = parameter_shapes(assembly.recipe)
    check_frozen(assembly.recipe, shapes)
    everything = parameter_shardings(all_parameters(assembly.recipe), shapes, mesh)
    trained, frozen = split_frozen(jax.tree.map(_placed, shapes, everything), assembly.recipe)
    return [
        _stage(assembly, index, task, mesh, microbatches, trained, frozen)
        for index, _, task in every_task(assembly.recipe)
    ]


def of_phase(made: Sequence[Stage], index: int) -> dict[str, Stage]:
    """The stages of a phase, by the names of their tasks."""
    return {stage.task.name: stage for stage in made if stage.index == index}


def any_task(made: Sequence[Stage], index: int) -> Stage:
    """A stage of a phase, for what is not of one task."""
    return next(stage for stage in made if stage.index == index)


def load_of(recipe: Recipe, devices: list[jax.Device], memory: float | None) -> Load:
    """What devices with so much memory have to do for a recipe, by which its mesh is chosen."""
    shapes = parameter_shapes(recipe)
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


def _stage(
    assembly: Assembly,
    index: int,
    task: Task,
    mesh: Mesh,
    microbatches: int,
    params: Params,
    frozen: Params,
) -> Stage:
    recipe, phase, objective = assembly.recipe, assembly.recipe.phases[index], task.objective
    untrained = partial(unread, recipe, index)
    everywhere = replicated(mesh)
    first_carry, carry, axes = _carry(lambda: initial_carry(assembly, index), mesh)
    moments_before, opt_state = _moments(assembly, index, mesh, params)
    seen, skipped = (jax.ShapeDtypeStruct(shape, np.int32, sharding=everywhere) for shape in ((), (2,)))
    state = TrainState(seen, params, opt_state, carry, skipped)
    evaluated_rows = _evaluated_rows(objective, phase, mesh, microbatches)
    in_evaluation = dataclasses.replace(phase, batch_size=evaluated_rows)
    first_evaluated, evaluated_carry, _ = _carry(lambda: objective.carry(assembly.model, in_evaluation, False), mesh)
    spec = objective.spec(phase)
    batch, evaluated_batch = (shapes_of(spec, size, rows(mesh)) for size in (phase.batch_size, evaluated_rows))

    step = train_step(assembly, of_task(phase, task, axes), microbatches, index, task, untrained)
    options_of = small_product_options if count(merge(params, frozen)) <= SMALL else compiler_options
    options = options_of(mesh, looped=assembly.model.program.depth == "scan")
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=everywhere), given_in(recipe, index))
    evaluated = for_evaluation(assembly, index, task, mesh)
    evaluation = evaluation_step(objective, evaluated.model, EVALUATION_SEED, assembly.teachers)
    number = jax.ShapeDtypeStruct((), np.int32)
    run_step = jit_on(mesh, assembly, step, options, out_shardings=(shardings(state), everywhere), donate_argnums=0)
    train = Jitted(run_step, (state, frozen, batch, given), options)
    outputs = everywhere, everywhere, shardings(evaluated_carry)  # it comes back as it lies in the first one
    run_evaluation = jit_on(mesh, evaluated, evaluation, options, out_shardings=outputs)
    of_evaluation = (params, frozen, evaluated_batch, number, number, evaluated_carry, number)
    evaluate = Jitted(run_evaluation, of_evaluation, options)
    first = (first_carry, moments_before, first_evaluated)
    return Stage(assembly, index, task, mesh, state, frozen, untrained, train, evaluate, evaluated_rows, *first)


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
    of_tokens = parts * EVALUATED_TOKENS // objective.rows(phase).tokens
    most = min(phase.batch_size // microbatches, EVALUATED_ROWS, of_tokens)
    return max((n for n in range(parts, most + 1, parts) if phase.batch_size % n == 0), default=parts)


def _carry(make: Callable, mesh: Mesh) -> tuple[Callable, Any, Any]:
    """(makes a first carry, jitted; the carry as shapes, dtypes and shardings; its axes).   make: () -> (it, its axes).

    Nothing is computed: a memory of many rows fits on no single device.
    """
    axes = []

    def carry():
        made, of_made = make()
        axes.append(of_made)
        return made

    shapes = jax.eval_shape(carry)
    where = carry_shardings(axes[0], mesh)
    return jax.jit(carry, out_shardings=where), jax.tree.map(_placed, shapes, where), axes[0]


def _moments(assembly: Assembly, index: int, mesh: Mesh, params: Params) -> tuple[Callable, Any]:
    """(parameters -> the optimiser's state before a phase, jitted; that as shapes, dtypes and shardings)."""

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
    """Of a moment as its parameter lies; one that has a mean along an axis is not cut there."""
    spec = (*sharding.spec, *(None,) * (len(shape.shape) - len(sharding.spec)))
    kept = (None if size == 1 else over for size, over in zip(shape.shape, spec, strict=True))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def trace(made: list[Stage], names: Sequence[str] = (TRAIN, EVALUATE)) -> None:
    """Trace their programs with these names, which are not compiled. UserError where a mesh does not divide activations
    evenly."""
    for stage in made:
        with divided_by(stage.mesh):
            for program in (getattr(stage, FIELDS[name]) for name in names):
                program.run.trace(*program.arguments)


def compiles_ahead(mesh: Mesh) -> bool:
    """On accelerators, where a program that is compiled is kept for the next start. A CPU compiles within seconds when
    a phase begins, and says then what does not fit."""
    return mesh.devices.flat[0].platform != "cpu"


def compile_phases(made: list[Stage], names: Mapping[int, list[str]], say: Callable[[str], None]) -> list[Stage]:
    """The same stages, whose programs with these names (phase -> names) are compiled.

    say: is told what takes so long, and how long it took.   UserError for what does not fit a device.
    """
    made = list(made)
    for number, stage in enumerate(made):
        if stage.index in names:
            say(f"compiling {stage.title}: {', '.join(names[stage.index])}")
            start = time.perf_counter()
            made[number], needed = _compiled_stage(stage, names[stage.index])
            sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needed.items())
            say(f"compiled in {time.perf_counter() - start:.0f} s; GiB of each device: {sizes}")
    return made


def _compiled_stage(stage: Stage, wanted: list[str]) -> tuple[Stage, dict[str, int]]:
    """(the stage with compiled programs; name -> bytes of a device)."""
    needed = {}
    beside = {EVALUATE: shard_bytes(stage.state._replace(params=()))}  # which lies there, but is not read
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
            has = f"takes {size / GIB:.2f} GiB of a device that has {capacity / GIB:.2f}"
            raise UserError(_too_large(stage.index, name, has))
    return stage, needed


@contextlib.contextmanager
def no_memory(phase: int, name: str) -> Iterator[None]:
    """Where a program finds no memory: UserError says what makes it smaller."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(_too_large(phase, name, "does not fit a device's memory")) from error


def _bytes(compiled: jax.stages.Compiled) -> int:
    """What a program takes of a device's memory; outputs that reuse an argument's cost nothing."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes
    )


def _too_large(phase: int, name: str, how: str) -> str:
    cure = CURES.get(name, CURES[EVALUATE])  # of a checkpoint as of an evaluation
    smaller = f"in another --workdir, a smaller phases.{phase}.batch_size"
    return f"phase {phase + 1}: its {name} {how}; {cure} or, {smaller}"
