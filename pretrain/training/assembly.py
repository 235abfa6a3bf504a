"""A recipe put together: its model, optimiser, parameter table and states."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import optax

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from models.attention.mask import PAIRS
from models.core import program as programs
from models.core.family import Family
from models.core.parameters import Parameter, Params, leaves, nest
from models.core.program import Program
from models.families.registry import family_of
from pretrain.objectives.inputs import initialise
from pretrain.objectives.teacher import TEACHERS, scope
from pretrain.optimizers import transformation
from pretrain.recipe import Phase, Recipe
from pretrain.state import TrainState
from pretrain.training.step import new_state, traced_loss
from tpu.flops import flops


class Assembly(NamedTuple):
    """table: of the trained parameters only.   teachers: by name, the frozen models beside."""

    recipe: Recipe
    family: Family
    model: nn.Module
    table: list[Parameter]
    optimizer: optax.GradientTransformation
    teachers: dict[str, nn.Module]


def assemble(recipe: Recipe, program: Program | None = None) -> Assembly:
    """Nothing is allocated or compiled yet; UserError when `frozen` names no parameter, or all."""
    everything = table_of(recipe.model, recipe.objective.asks)
    _check_frozen(recipe.frozen, [parameter.path for parameter in everything])
    table = [parameter for parameter in everything if not _is_frozen(parameter.path, recipe.frozen)]
    program = program or programs.default()
    # Kernels are chosen for the trained model: a teacher's attention may be one that they do not take.
    plain = dataclasses.replace(program, attention="xla")
    teachers = {one.name: model_of(one.model, recipe.objective.teachers[one.name], plain) for one in recipe.teachers}
    optimizer = transformation(recipe.optimizer, table)
    model = model_of(recipe.model, recipe.objective.asks, program)
    return Assembly(recipe, family_of(recipe.model), model, table, optimizer, teachers)


def model_of(config: Any, asks: Iterable[type | str], program: Program) -> nn.Module:
    """A config's model with the heads that are asked for."""
    return family_of(config).module(config, program, made_heads(config, asks))


def made_heads(config: Any, asks: Iterable[type | str]) -> tuple[str, ...]:
    """The heads of a config's model in which those that are asked for are trained."""
    return family_of(config).heads_with([name for name in asks if isinstance(name, str)])


def initial_params(assembly: Assembly) -> Params:
    """Random parameters of the model, trained and frozen, from the recipe's seed."""
    recipe = assembly.recipe
    spec = recipe.objective.spec(recipe.phases[0])
    return initialise(jax.random.key(recipe.seed), assembly.model, spec)


def parameter_shapes(assembly: Assembly) -> Params:
    """`initial_params` and the teachers' as shapes, whatever the program, without computing anything."""
    spec, key = assembly.recipe.objective.spec(assembly.recipe.phases[0]), jax.random.key(0)

    def teach():
        return {name: initialise(key, module, spec) for name, module in assembly.teachers.items()}

    return jax.eval_shape(lambda: initial_params(assembly) | ({TEACHERS: teach()} if assembly.teachers else {}))


def all_parameters(recipe: Recipe) -> list[Parameter]:
    """The tables of the model and of its teachers, by their paths in `parameter_shapes`."""

    def below(name, parameter):
        return parameter._replace(path=f"{TEACHERS}/{name}/{parameter.path}")

    asked = recipe.objective.teachers
    of_teachers = [below(one.name, row) for one in recipe.teachers for row in table_of(one.model, asked[one.name])]
    return table_of(recipe.model, recipe.objective.asks) + of_teachers


def table_of(config: Any, asks: Iterable[type | str]) -> list[Parameter]:
    """The parameter table of a config's model with the heads that are asked for."""
    return family_of(config).parameters(config, made_heads(config, asks))


@functools.lru_cache
def model_flops(recipe: Recipe, phase: Phase) -> float:
    """FLOPs of a train step that the model needs, counted in its traced loss: of attention those of the pairs that
    `Family.seen` says, of relative attention all. The backward pass costs two forward passes, since a product's
    gradient is two products of its size; a teacher has none."""
    assembly, objective = assemble(recipe, Program(attention="dense")), recipe.objective
    trained, frozen = split_frozen(parameter_shapes(assembly), recipe)
    carry = jax.eval_shape(lambda: objective.carry(assembly.model, phase, train=True)[0])
    spec = objective.spec(phase).items()
    batch = {name: jax.ShapeDtypeStruct((phase.batch_size, *shape), dtype) for name, (shape, dtype) in spec}
    traced = traced_loss(objective, assembly.model, trained, frozen, batch, carry, assembly.teachers)
    taught = {scope(teacher.name): teacher.model for teacher in recipe.teachers}

    def counted_as(where: str) -> float:
        passes, model = next(((1, model) for name, model in taught.items() if name in where), (3, recipe.model))
        return passes * (family_of(model).seen(model, phase) if PAIRS in where else 1.0)

    return flops(traced, {}, counted_as).total


def mean_flops(recipe: Recipe) -> float:
    """`model_flops` of a step, the mean of a run's: all of its phases have one mesh, which is chosen by them."""
    return sum(phase.share * model_flops(recipe, phase) for phase in recipe.phases)


def split_frozen(params: Params, recipe: Recipe) -> tuple[Params, Params]:
    """(trained, frozen) parameters, by the path prefixes that the recipe freezes; teachers are frozen."""
    frozen = (*recipe.frozen, TEACHERS)
    flat = dict(leaves(params))
    held = {path: leaf for path, leaf in flat.items() if _is_frozen(path, frozen)}
    return nest({path: leaf for path, leaf in flat.items() if path not in held}), nest(held)


def initial_state(assembly: Assembly, params: Params, phase: int) -> tuple[TrainState, Params]:
    """(state before the first step, frozen parameters)."""
    trained, frozen = split_frozen(params, assembly.recipe)
    carry, _ = initial_carry(assembly, phase)
    return new_state(trained, assembly.optimizer, carry), frozen


def initial_carry(assembly: Assembly, phase: int) -> tuple[Any, Any]:
    """The objective's carry before a phase's first batch, and its axes."""
    return assembly.recipe.objective.carry(assembly.model, assembly.recipe.phases[phase], train=True)


def _check_frozen(prefixes: tuple[str, ...], paths: list[str]) -> None:
    for prefix in prefixes:
        if not any(_is_frozen(path, (prefix,)) for path in paths):
            known = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
            raise UserError(unknown("frozen: no parameters are below", prefix, known))
    if all(_is_frozen(path, prefixes) for path in paths):
        raise UserError(f"frozen={prefixes}: nothing is left to train; freeze less")


def _is_frozen(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
