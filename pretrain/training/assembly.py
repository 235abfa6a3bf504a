"""A recipe put together: its model, parameter table and optimisers."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import optax
from jax import Array

from models.core import program as programs
from models.core.family import Family
from models.core.parameters import Parameter, Params
from models.core.program import Program
from models.families.registry import family_of
from pretrain.objectives.objective import TEACHERS, Phase, Task, initialise
from pretrain.optimizers import Optimizer, transformation
from pretrain.recipe import Recipe, asked, asked_of_teachers, every_task, tasks_of
from pretrain.training.sparse_rows import check_sparse
from pretrain.training.trained import check_frozen, frozen_in, is_frozen


class Assembly(NamedTuple):
    """table: of the parameters that some phase may train.   teachers: by name, the frozen models beside."""

    recipe: Recipe
    family: Family
    model: nn.Module
    table: list[Parameter]
    teachers: Mapping[str, nn.Module]


def assemble(recipe: Recipe, program: Program | None = None) -> Assembly:
    """Nothing is allocated or compiled yet; UserError when `frozen` names no parameter, or all, or when a phase cannot
    train a sparse table."""
    everything = table_of(recipe.model, asked(recipe))
    check_frozen(recipe, everything)
    table = [parameter for parameter in everything if not is_frozen(parameter.path, recipe.frozen)]
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
    return transformation(optimizer_in(recipe, index), trained)


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
    _, phase, task = every_task(assembly.recipe)[0]
    return initialise(key, assembly.model, task.objective.spec(phase))


def parameter_shapes(assembly: Assembly) -> Params:
    """`initial_params` and the teachers' as shapes, whatever the program, without computing anything."""
    key, tasks = jax.random.key(0), every_task(assembly.recipe)

    def teach(name, module):
        phase, task = next((phase, task) for _, phase, task in tasks if name in task.objective.teachers)
        return initialise(key, module, task.objective.spec(phase))

    def make():
        teachers = {name: teach(name, module) for name, module in assembly.teachers.items()}
        return initial_params(assembly) | ({TEACHERS: teachers} if teachers else {})

    return jax.eval_shape(make)


def all_parameters(recipe: Recipe) -> list[Parameter]:
    """The tables of the model and of its teachers, by their paths in `parameter_shapes`."""

    def below(name, parameter):
        return parameter._replace(path=f"{TEACHERS}/{name}/{parameter.path}")

    asks = asked_of_teachers(recipe)
    of_teachers = [below(one.name, row) for one in recipe.teachers for row in table_of(one.model, asks[one.name])]
    return table_of(recipe.model, asked(recipe)) + of_teachers


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
