"""Assemble a recipe: its model, parameter table and optimizers, and the parameters that each phase trains."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from jax import Array

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from models.core import program as programs
from models.core.family import Family
from models.core.parameters import LAYERS, Parameter, Params, leaves, nest
from models.core.program import Program
from models.families.registry import family_of
from pretrain.lora import initial_products, with_products
from pretrain.objectives.objective import TEACHERS, Phase, Task, initialise
from pretrain.optimizers import Optimizer, transformation
from pretrain.recipe import Recipe, asked, asked_of_teachers, every_task, model_in, projections, tasks_of

ALL = slice(None)  # all layers, or a parameter outside of a stack


class Part(NamedTuple):
    """The parameters that one entry of `frozen` names.   layers: those of a stack, or ALL."""

    path: str
    layers: slice

    def has(self, path: str) -> bool:
        """Return whether a parameter is below this path."""
        return path == self.path or path.startswith(f"{self.path}/")


@functools.cache
def part(entry: str) -> Part:
    """Parse an entry: 'embeddings' is a path; 'layers[0:6]' and 'layers[0:6]/attention' are layers 0 to 5."""
    match = re.fullmatch(r"(.+?)\[(\d+):(\d+)\](/.+)?", entry)
    if match is None:
        return Part(entry, ALL)
    stack, first, end, below = match.groups(default="")
    return Part(stack + below, slice(int(first), int(end)))


def frozen_layers(path: str, entries: Iterable[str]) -> list[slice]:
    """List the frozen layers of a parameter; ALL means the whole parameter."""
    return [named.layers for named in map(part, entries) if named.has(path)]


def is_frozen(path: str, entries: Iterable[str]) -> bool:
    """Return whether a whole parameter is frozen."""
    return ALL in frozen_layers(path, entries)


def frozen_in(recipe: Recipe, index: int) -> tuple[str, ...]:
    """Return all entries of `frozen` that apply in a phase."""
    return (*recipe.frozen, *recipe.phases[index].frozen)


def split(params: Params, entries: Iterable[str]) -> tuple[Params, Params]:
    """Split parameters into (the rest, those that are frozen as a whole)."""
    flat = dict(leaves(params))
    held = {path: leaf for path, leaf in flat.items() if is_frozen(path, entries)}
    return nest({path: leaf for path, leaf in flat.items() if path not in held}), nest(held)


def split_frozen(params: Params, recipe: Recipe) -> tuple[Params, Params]:
    """Split parameters into (those that some phase may train, those outside of the train state, like teachers)."""
    return split(params, (*recipe.frozen, TEACHERS))


def merge(params: Params, frozen: Params) -> Params:
    """Merge two nested dicts; the inverse of `split`."""
    if not frozen:
        return params
    merged = dict(frozen)
    for key, value in params.items():
        merged[key] = merge(value, frozen[key]) if isinstance(value, dict) and key in frozen else value
    return merged


def check_frozen(recipe: Recipe, shapes: Params) -> None:
    """Raise UserError if an entry names no parameter or no layers of a stack, or if nothing is left to train."""
    table, flat = own_parameters(recipe), dict(leaves(shapes))
    for index in range(len(recipe.phases)):
        entries = frozen_in(recipe, index)
        for entry in entries:
            named = part(entry)
            setting = "frozen" if entry in recipe.frozen else f"phases.{index}.frozen"
            below = [parameter for parameter in table if named.has(parameter.path)]
            if not below and "[" in named.path:
                raise UserError(f"{setting}: {entry} is not a path; write layers 0 and 1 as layers[0:2]")
            if not below:
                known = {path[:end] for path, *_ in table for end, letter in enumerate(path) if letter == "/"}
                raise UserError(unknown(f"{setting}: no parameters are below", named.path, known))
            if named.layers == ALL:
                continue
            if not all(parameter.axes[:1] == (LAYERS,) for parameter in below):
                raise UserError(f"{setting}: {entry} has layer numbers, but is not a stack of layers; leave them out")
            depth = min(flat[parameter.path].shape[0] for parameter in below)
            if not named.layers.start < named.layers.stop <= depth:
                raise UserError(f"{setting}: {entry} is not a range of the {depth} layers; give one, from 0 on")
        if all(_all_frozen(path, flat[path].shape, entries) for path, *_ in table):
            raise UserError(f"frozen={entries}: nothing is left to train; freeze less")


def _all_frozen(path: str, shape: tuple[int, ...], entries: Iterable[str]) -> bool:
    frozen = np.zeros(shape[:1] or 1, bool)
    for layers in frozen_layers(path, entries):
        frozen[layers] = True
    return frozen.all()


def check_sparse(recipe: Recipe, index: int, optimizer: Optimizer, table: Sequence[Parameter]) -> None:
    """Raise UserError if a phase trains a sparse table by an optimizer that reads all, or by batches without rows."""
    for parameter in table:
        if not parameter.ids or is_frozen(parameter.path, frozen_in(recipe, index)):
            continue
        if optimizer.ema:
            raise UserError(f"optimizer.ema={optimizer.ema}: a step reads not all of {parameter.path}; set it to 0")
        if optimizer.name in ("lamb", "adafactor", "stable-adamw"):
            raise UserError(
                f"optimizer.name={optimizer.name}: needs the norm of all of {parameter.path}, but a step reads only "
                "some rows; use adamw or adagrad, or freeze it"
            )
        phase = recipe.phases[index]
        arrays = {name for task in tasks_of(recipe, phase) for name in task.objective.spec(phase)}
        if not arrays & {*parameter.ids}:
            raise UserError(
                f"phases.{index}: its batches lack {' or '.join(parameter.ids)}, the rows of {parameter.path} (they "
                f"have {', '.join(sorted(arrays))}); freeze it, or choose another objective"
            )


class Assembly(NamedTuple):
    """A recipe with its modules.   table: parameters that some phase may train.   teachers: frozen models by name."""

    recipe: Recipe
    family: Family
    model: nn.Module
    table: list[Parameter]
    teachers: Mapping[str, nn.Module]


def assemble(recipe: Recipe, program: Program | None = None) -> Assembly:
    """Assemble a recipe, without allocating or compiling; UserError if a phase cannot train a sparse table."""
    table = [row for row in own_parameters(recipe) if not is_frozen(row.path, recipe.frozen)]
    for index in range(len(recipe.phases)):
        check_sparse(recipe, index, optimizer_in(recipe, index), table)
    program = program or programs.default()
    # Kernels are chosen for the trained model; `with_kernels` gives them to teachers whose attention they can compute.
    plain, asks = dataclasses.replace(program, attention="xla"), asked_of_teachers(recipe)
    teachers = {teacher.name: model_of(teacher.model, asks[teacher.name], plain) for teacher in recipe.teachers}
    model = model_of(recipe.model, asked(recipe), program)
    return Assembly(recipe, family_of(recipe.model), model, table, teachers)


def in_phase(assembly: Assembly, index: int) -> Assembly:
    """Return the assembly with the model as it is in a phase."""
    return assembly._replace(model=assembly.model.clone(config=model_in(assembly.recipe, index)))


def optimizer_in(recipe: Recipe, index: int) -> Optimizer:
    """Return the optimizer of a phase."""
    return recipe.phases[index].optimizer or recipe.optimizer


def transformation_in(assembly: Assembly, index: int) -> optax.GradientTransformation:
    """Build the optax transformation of the parameters that a phase trains."""
    recipe = assembly.recipe
    frozen = frozen_in(recipe, index)
    trained = [parameter for parameter in assembly.table if not is_frozen(parameter.path, frozen)]
    compute = assembly.model.program.compute
    return transformation(optimizer_in(recipe, index), trained, recipe.model.vocab_size, compute)


def same_training(recipe: Recipe, one: int, other: int) -> bool:
    """Return whether two phases freeze the same parameters and have the same kind of optimizer and mean of weights."""

    def trained(index: int) -> tuple:
        optimizer = optimizer_in(recipe, index)
        return {*frozen_in(recipe, index)}, optimizer.name, optimizer.ema

    return trained(one) == trained(other)


def model_of(config: Any, asks: Iterable[type | str], program: Program) -> nn.Module:
    """Build a config's model with the needed heads."""
    return family_of(config).module(config, program, made_heads(config, asks))


def made_heads(config: Any, asks: Iterable[type | str]) -> tuple[str, ...]:
    """Return the heads that a config's model is built with so that the needed ones can be trained."""
    return family_of(config).heads_with([name for name in asks if isinstance(name, str)])


def initial_params(assembly: Assembly, key: Array | None = None) -> Params:
    """Initialize the parameters of the model, trained and frozen.   key: by default from the recipe's seed."""
    key = jax.random.key(assembly.recipe.seed) if key is None else key
    recipe = assembly.recipe
    _, phase, task = every_task(recipe)[0]
    params = initialise(key, assembly.model, task.objective.spec(phase))
    if recipe.lora is not None:
        of_model = table_of(recipe.model, asked(recipe))
        params |= initial_products(jax.random.fold_in(key, 1), of_model, params, recipe.lora)
    matrices = {
        path: jax.random.normal(jax.random.fold_in(key, 2 + number), shape) * shape[0] ** -0.5
        for number, (path, shape) in enumerate(projections(recipe).items())
    }
    return params | nest(matrices)


@functools.lru_cache
def parameter_shapes(recipe: Recipe) -> Params:
    """Return the shapes of `initial_params` and of the teachers' parameters, without computing anything."""
    assembly, key, tasks = assemble(recipe, Program()), jax.random.key(0), every_task(recipe)

    def teach(name, module):
        phase, task = next((phase, task) for _, phase, task in tasks if name in task.objective.teachers)
        return initialise(key, module, task.objective.spec(phase))

    def make():
        teachers = {name: teach(name, module) for name, module in assembly.teachers.items()}
        return initial_params(assembly) | ({TEACHERS: teachers} if teachers else {})

    return jax.eval_shape(make)


def all_parameters(recipe: Recipe) -> list[Parameter]:
    """Return the parameter tables of the model and its teachers, with the paths of `parameter_shapes`."""

    def below(name, parameter):
        return parameter._replace(path=f"{TEACHERS}/{name}/{parameter.path}")

    asks = asked_of_teachers(recipe)
    return own_parameters(recipe) + [
        below(teacher.name, row) for teacher in recipe.teachers for row in table_of(teacher.model, asks[teacher.name])
    ]


def own_parameters(recipe: Recipe) -> list[Parameter]:
    """Return the parameter table of a recipe's model, with low-rank products and projections to its teachers."""
    table = with_products(table_of(recipe.model, asked(recipe)), recipe.lora)
    return table + [Parameter(path, ("width", None), {}) for path in projections(recipe)]


def table_of(config: Any, asks: Iterable[type | str]) -> list[Parameter]:
    """Return the parameter table of a config's model with the needed heads."""
    return family_of(config).parameters(config, made_heads(config, asks))


def initial_carry(assembly: Assembly, index: int) -> tuple[Any, Any]:
    """Return (carry before a phase's first batch, its axes): the objective's, or with tasks each task's by name."""
    phase = assembly.recipe.phases[index]
    carries = {
        task.name: task.objective.carry(assembly.model, phase, train=True) for task in tasks_of(assembly.recipe, phase)
    }
    if not phase.tasks:
        return carries[""]
    return {name: carry for name, (carry, _) in carries.items()}, {name: axes for name, (_, axes) in carries.items()}


def of_task(phase: Phase, task: Task, carry: Any) -> Any:
    """Select a task's part of its phase's carry, or of the carry's axes."""
    return carry[task.name] if phase.tasks else carry
