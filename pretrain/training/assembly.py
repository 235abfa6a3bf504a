"""A recipe put together: its model, optimiser, parameter table and states."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import optax

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from models.core import program as programs
from models.core.family import Family
from models.core.parameters import Parameter, Params, leaves, nest
from models.core.program import Program
from models.families.registry import family_of
from pretrain.objectives.inputs import initialise
from pretrain.optimizers import transformation
from pretrain.recipe import Phase, Recipe
from pretrain.state import TrainState
from pretrain.training.step import new_state


class Assembly(NamedTuple):
    """table: of the trained parameters only."""

    recipe: Recipe
    family: Family
    model: nn.Module
    table: list[Parameter]
    optimizer: optax.GradientTransformation


def assemble(recipe: Recipe, program: Program | None = None) -> Assembly:
    """Nothing is allocated or compiled yet; UserError when `frozen` names no parameter, or all."""
    family = family_of(recipe.model)
    everything = family.parameters(recipe.model)
    _check_frozen(recipe.frozen, [parameter.path for parameter in everything])
    table = [parameter for parameter in everything if not _is_frozen(parameter.path, recipe.frozen)]
    model = family.module(recipe.model, program or programs.default())
    return Assembly(recipe, family, model, table, transformation(recipe.optimizer, table))


def initial_params(assembly: Assembly) -> Params:
    """Random parameters, trained and frozen, from the recipe's seed."""
    recipe = assembly.recipe
    spec = recipe.objective.spec(recipe.phases[0])
    return initialise(jax.random.key(recipe.seed), assembly.model, spec)


def parameter_shapes(assembly: Assembly) -> Params:
    """`initial_params` as shapes, whatever the program, without computing anything."""
    return jax.eval_shape(lambda: initial_params(assembly))


def model_flops(recipe: Recipe, phase: Phase) -> float:
    """FLOPs of a train step that the model needs: the backward pass costs two forward passes, since a product's
    gradient is two products of its size."""
    return 3 * family_of(recipe.model).flops(recipe.model, phase, recipe.objective.predictions(phase))


def split_frozen(params: Params, frozen: tuple[str, ...]) -> tuple[Params, Params]:
    """(trained, frozen) parameters by path prefix."""
    flat = dict(leaves(params))
    held = {path: leaf for path, leaf in flat.items() if _is_frozen(path, frozen)}
    return nest({path: leaf for path, leaf in flat.items() if path not in held}), nest(held)


def initial_state(assembly: Assembly, params: Params, phase: int) -> tuple[TrainState, Params]:
    """(state before the first step, frozen parameters)."""
    trained, frozen = split_frozen(params, assembly.recipe.frozen)
    carry, _ = initial_carry(assembly, phase)
    return new_state(trained, assembly.optimizer, carry), frozen


def initial_carry(assembly: Assembly, phase: int, train: bool = True) -> tuple[Any, Any]:
    """The objective's carry before a phase's first batch, and its axes."""
    return assembly.recipe.objective.carry(assembly.model, assembly.recipe.phases[phase], train)


def _check_frozen(prefixes: tuple[str, ...], paths: list[str]) -> None:
    for prefix in prefixes:
        if not any(_is_frozen(path, (prefix,)) for path in paths):
            known = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
            raise UserError(unknown("frozen: no parameters are below", prefix, known))
    if all(_is_frozen(path, prefixes) for path in paths):
        raise UserError(f"frozen={prefixes}: nothing is left to train; freeze less")


def _is_frozen(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
