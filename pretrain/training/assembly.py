"""A recipe put together: its model, parameter table and optimisers, and which parameters a phase trains."""

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
from models.core.sharding import placed_by
from models.families.registry import family_of
from pretrain.lora import initial_products, with_products
from pretrain.objectives.objective import TEACHERS, Phase, Task, initialise
from pretrain.optimizers import Optimizer, transformation
from pretrain.recipe import Recipe, asked, asked_of_teachers, every_task, tasks_of

ALL = slice(None)  # layers of what may be no stack


class Part(NamedTuple):
    """What one entry of `frozen` names. layers: of a stack, ALL for all that is there."""

    path: str
    layers: slice

    def has(self, path: str) -> bool:
        """Whether a parameter is there."""
        return path == self.path or path.startswith(f"{self.path}/")


@functools.cache
def part(entry: str) -> Part:
    """Of an entry: 'embeddings' is a path; 'layers[0:6]' and 'layers[0:6]/attention' are layers 0 to 5 of what is
    stacked there."""
    found = re.fullmatch(r"(.+?)\[(\d+):(\d+)\](/.+)?", entry)
    if found is None:
        return Part(entry, ALL)
    stack, first, end, below = found.groups(default="")
    return Part(stack + below, slice(int(first), int(end)))


def frozen_layers(path: str, entries: Iterable[str]) -> list[slice]:
    """The layers of a parameter that are frozen, ALL where it is as a whole."""
    return [of.layers for of in map(part, entries) if of.has(path)]


def is_frozen(path: str, entries: Iterable[str]) -> bool:
    """Whether a parameter is frozen as a whole."""
    return ALL in frozen_layers(path, entries)


def frozen_in(recipe: Recipe, index: int) -> tuple[str, ...]:
    """What is frozen in a phase, all entries."""
    return (*recipe.frozen, *recipe.phases[index].frozen)


def split(params: Params, entries: Iterable[str]) -> tuple[Params, Params]:
    """(parameters, those that are frozen as a whole)."""
    flat = dict(leaves(params))
    held = {path: leaf for path, leaf in flat.items() if is_frozen(path, entries)}
    return nest({path: leaf for path, leaf in flat.items() if path not in held}), nest(held)


def split_frozen(params: Params, recipe: Recipe) -> tuple[Params, Params]:
    """(what some phase may train, what none does: it lies outside the train state); teachers are frozen."""
    return split(params, (*recipe.frozen, TEACHERS))


def merge(params: Params, frozen: Params) -> Params:
    """One nested dict of two: the inverse of `split`."""
    if not frozen:
        return params
    merged = dict(frozen)
    for key, value in params.items():
        merged[key] = merge(value, frozen[key]) if isinstance(value, dict) and key in frozen else value
    return merged


def check_frozen(recipe: Recipe, shapes: Params) -> None:
    """UserError where an entry names no parameter, or layers that a stack has not, or nothing is left to train."""
    table, flat = own_parameters(recipe), dict(leaves(shapes))
    for index in range(len(recipe.phases)):
        entries = frozen_in(recipe, index)
        for entry in entries:
            of = part(entry)
            setting = "frozen" if entry in recipe.frozen else f"phases.{index}.frozen"
            below = [parameter for parameter in table if of.has(parameter.path)]
            if not below and "[" in of.path:
                raise UserError(f"{setting}: {entry} is no path; layers 0 and 1 are layers[0:2]")
            if not below:
                known = {path[:end] for path, *_ in table for end, letter in enumerate(path) if letter == "/"}
                raise UserError(unknown(f"{setting}: no parameters are below", of.path, known))
            if of.layers == ALL:
                continue
            if not all(parameter.axes[:1] == (LAYERS,) for parameter in below):
                raise UserError(f"{setting}: {entry} names layers of what is no stack; leave the numbers out")
            depth = min(flat[parameter.path].shape[0] for parameter in below)
            if not of.layers.start < of.layers.stop <= depth:
                raise UserError(f"{setting}: {entry} is no range of the {depth} layers there; give one, from 0 on")
        if all(_all_frozen(path, flat[path].shape, entries) for path, *_ in table):
            raise UserError(f"frozen={entries}: nothing is left to train; freeze less")


def _all_frozen(path: str, shape: tuple[int, ...], entries: Iterable[str]) -> bool:
    frozen = np.zeros(shape[:1] or 1, bool)
    for layers in frozen_layers(path, entries):
        frozen[layers] = True
    return frozen.all()


def check_sparse(recipe: Recipe, index: int, optimizer: Optimizer, table: Sequence[Parameter]) -> None:
    """UserError where a phase trains a sparse table by an optimiser that reads it whole, or no batch names rows."""
    for parameter in table:
        if not parameter.ids or is_frozen(parameter.path, frozen_in(recipe, index)):
            continue
        if optimizer.name in ("lamb", "adafactor"):
            raise UserError(
                f"optimizer.name={optimizer.name} takes the norm of {parameter.path} as a whole, of which a step reads "
                "some rows alone: use adamw or adagrad, or freeze it"
            )
        phase = recipe.phases[index]
        has = {name for task in tasks_of(recipe, phase) for name in task.objective.spec(phase)}
        if not has & {*parameter.ids}:
            raise UserError(
                f"phases.{index}: its batches name no rows of {parameter.path}, as {' or '.join(parameter.ids)} would "
                f"(they have {', '.join(sorted(has))}): freeze it, or choose another objective"
            )


class Assembly(NamedTuple):
    """table: of the parameters that some phase may train.   teachers: by name, the frozen models beside."""

    recipe: Recipe
    family: Family
    model: nn.Module
    table: list[Parameter]
    teachers: Mapping[str, nn.Module]


def assemble(recipe: Recipe, program: Program | None = None) -> Assembly:
    """Nothing is allocated or compiled yet; UserError when a phase cannot train a sparse table."""
    table = [row for row in own_parameters(recipe) if not is_frozen(row.path, recipe.frozen)]
    for index in range(len(recipe.phases)):
        check_sparse(recipe, index, optimizer_in(recipe, index), table)
    program = program or programs.default()
    # Kernels are chosen for the trained model: a teacher's attention may be one that they do not take.
    plain, asks = dataclasses.replace(program, attention="xla"), asked_of_teachers(recipe)
    teachers = {one.name: model_of(one.model, asks[one.name], plain) for one in recipe.teachers}
    model = model_of(recipe.model, asked(recipe), program)
    return Assembly(recipe, family_of(recipe.model), model, table, teachers)


def optimizer_in(recipe: Recipe, index: int) -> Optimizer:
    """That of a phase."""
    return recipe.phases[index].optimizer or recipe.optimizer


def transformation_in(assembly: Assembly, index: int) -> optax.GradientTransformation:
    """The same of the parameters that the phase trains."""
    recipe = assembly.recipe
    frozen = frozen_in(recipe, index)
    trained = [parameter for parameter in assembly.table if not is_frozen(parameter.path, frozen)]
    return transformation(optimizer_in(recipe, index), trained, recipe.model.vocab_size)


def same_training(recipe: Recipe, one: int, other: int) -> bool:
    """Whether two phases freeze the same parameters and have the same kind of optimiser."""
    same = {*frozen_in(recipe, one)} == {*frozen_in(recipe, other)}
    return same and optimizer_in(recipe, one).name == optimizer_in(recipe, other).name


def model_of(config: Any, asks: Iterable[type | str], program: Program) -> nn.Module:
    """A config's model with the heads that are asked for."""
    return family_of(config).module(config, program, made_heads(config, asks))


def made_heads(config: Any, asks: Iterable[type | str]) -> tuple[str, ...]:
    """The heads of a config's model in which those that are asked for are trained."""
    return family_of(config).heads_with([name for name in asks if isinstance(name, str)])


def initial_params(assembly: Assembly, key: Array | None = None) -> Params:
    """Random parameters of the model, trained and frozen.   key: of the recipe's seed unless given."""
    key = jax.random.key(assembly.recipe.seed) if key is None else key
    recipe = assembly.recipe
    _, phase, task = every_task(recipe)[0]
    params = initialise(key, assembly.model, task.objective.spec(phase))
    if recipe.lora is None:
        return params
    of_model = table_of(recipe.model, asked(recipe))
    return params | initial_products(jax.random.fold_in(key, 1), of_model, params, recipe.lora)


@functools.lru_cache
def parameter_shapes(recipe: Recipe) -> Params:
    """`initial_params` and the teachers' as shapes, whatever the program, without computing anything."""
    assembly, key, tasks = assemble(recipe, Program()), jax.random.key(0), every_task(recipe)

    def teach(name, module):
        phase, task = next((phase, task) for _, phase, task in tasks if name in task.objective.teachers)
        return initialise(key, module, task.objective.spec(phase))

    def make():
        teachers = {name: teach(name, module) for name, module in assembly.teachers.items()}
        return initial_params(assembly) | ({TEACHERS: teachers} if teachers else {})

    with placed_by(None):  # also where a step is being traced for a mesh, which one row does not fill
        return jax.eval_shape(make)


def all_parameters(recipe: Recipe) -> list[Parameter]:
    """The tables of the model and of its teachers, by their paths in `parameter_shapes`."""

    def below(name, parameter):
        return parameter._replace(path=f"{TEACHERS}/{name}/{parameter.path}")

    asks = asked_of_teachers(recipe)
    of_teachers = [below(one.name, row) for one in recipe.teachers for row in table_of(one.model, asks[one.name])]
    return own_parameters(recipe) + of_teachers


def own_parameters(recipe: Recipe) -> list[Parameter]:
    """The table of a recipe's model, with the products beside its matrices."""
    return with_products(table_of(recipe.model, asked(recipe)), recipe.lora)


def table_of(config: Any, asks: Iterable[type | str]) -> list[Parameter]:
    """The parameter table of a config's model with the heads that are asked for."""
    return family_of(config).parameters(config, made_heads(config, asks))


def initial_carry(assembly: Assembly, index: int) -> tuple[Any, Any]:
    """The carry before a phase's first batch, the objective's or of tasks each one's by its name, and its axes."""
    phase = assembly.recipe.phases[index]
    carries = {
        task.name: task.objective.carry(assembly.model, phase, train=True) for task in tasks_of(assembly.recipe, phase)
    }
    if not phase.tasks:
        return carries[""]
    return {name: carry for name, (carry, _) in carries.items()}, {name: axes for name, (_, axes) in carries.items()}


def of_task(phase: Phase, task: Task, carry: Any) -> Any:
    """A task's part of a carry of its phase, or of its axes."""
    return carry[task.name] if phase.tasks else carry
