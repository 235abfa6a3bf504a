"""Which parameters a phase trains: all but those below the paths that are frozen, or some layers of them.

'embeddings' is a path; 'layers[0:6]' and 'layers[0:6]/attention' are layers 0 to 5 of what is stacked there.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from models.core.parameters import LAYERS, Parameter, Params, leaves, nest
from pretrain.objectives.objective import TEACHERS
from pretrain.recipe import Recipe


class Part(NamedTuple):
    """What one entry of `frozen` names. layers: (first, end) of a stack, None for all that is there."""

    path: str
    layers: tuple[int, int] | None

    def has(self, path: str) -> bool:
        """Whether a parameter is there."""
        return path == self.path or path.startswith(f"{self.path}/")


def part(entry: str) -> Part:
    """Of an entry."""
    found = re.fullmatch(r"(.+?)\[(\d+):(\d+)\](/.+)?", entry)
    if found is None:
        return Part(entry, None)
    stack, first, end, below = found.groups(default="")
    return Part(stack + below, (int(first), int(end)))


def is_frozen(path: str, entries: Iterable[str]) -> bool:
    """Whether a parameter is frozen as a whole."""
    return any(of.layers is None and of.has(path) for of in map(part, entries))


def frozen_layers(path: str, entries: Iterable[str]) -> list[slice]:
    """The layers of a stacked parameter that are frozen."""
    return [slice(*of.layers) for of in map(part, entries) if of.layers and of.has(path)]


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


def check_frozen(recipe: Recipe, table: Sequence[Parameter]) -> None:
    """UserError where an entry names no parameter."""
    for index in range(len(recipe.phases)):
        for entry in frozen_in(recipe, index):
            of = part(entry)
            setting = "frozen" if entry in recipe.frozen else f"phases.{index}.frozen"
            below = [parameter for parameter in table if of.has(parameter.path)]
            if not below and "[" in of.path:
                raise UserError(f"{setting}: {entry} is no path; layers 0 and 1 are layers[0:2]")
            if not below:
                known = {path[:end] for path, *_ in table for end, letter in enumerate(path) if letter == "/"}
                raise UserError(unknown(f"{setting}: no parameters are below", of.path, known))
            if of.layers and not all(parameter.axes[:1] == (LAYERS,) for parameter in below):
                raise UserError(f"{setting}: {entry} names layers of what is no stack; leave the numbers out")


def check_layers(recipe: Recipe, shapes: Params) -> None:
    """UserError where an entry names layers that a stack has not, or nothing is left to train."""
    flat = [(path, leaf.shape) for path, leaf in leaves(shapes) if not path.startswith(f"{TEACHERS}/")]
    for index in range(len(recipe.phases)):
        entries = frozen_in(recipe, index)
        for entry in entries:
            of = part(entry)
            depths = {shape[0] for path, shape in flat if of.layers and of.has(path)}
            if depths and not of.layers[0] < of.layers[1] <= min(depths):
                setting = "frozen" if entry in recipe.frozen else f"phases.{index}.frozen"
                raise UserError(
                    f"{setting}: {entry} is no range of the {min(depths)} layers there; give one, from 0 on"
                )

        def moves(path, shape, entries=entries):
            held = {layer for layers in frozen_layers(path, entries) for layer in range(layers.start, layers.stop)}
            return not is_frozen(path, entries) and not (held and len(held) == shape[0])

        if not any(moves(path, shape) for path, shape in flat):
            raise UserError(f"frozen={entries}: nothing is left to train; freeze less")
