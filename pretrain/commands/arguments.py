"""Parse the command line of `run`, `pattern` and `tpu plan`: a recipe, then its fields and the command's options.

Recipes are imported only where they are needed, because their models import JAX, which takes seconds.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from tyro.conf import arg

from data_pipelines.cloud import place
from data_pipelines.command_line import parse
from data_pipelines.errors import UserError
from data_pipelines.progress import IMPORTING, doing
from pretrain.commands.recipes import rows
from pretrain.options import How

if TYPE_CHECKING:
    from pretrain.recipe import Recipe

Options = TypeVar("Options")
UNNAMED = arg(name="")  # a dataclass whose fields are options: --steps, not --recipe.steps
CACHE = Path.home() / ".cache" / "pretrain-plans"


def parse_recipe(
    arguments: Sequence[str], options: type[Options], usage: str, purpose: str
) -> tuple["Recipe", Options]:
    """Parse a recipe's name, or --recipe FILE, then its fields and a command's options -> (recipe, options).

    usage: an example, 'python -m PROGRAM COMMAND RECIPE ...'.   purpose: text for --help, with {} for the recipe.
    """
    program = " ".join(usage.split()[:4])
    name, *rest = arguments or [""]
    file = rest[0] if name == "--recipe" and rest else name
    named = file and not file.startswith("-")
    if not named and {"-h", "--help"} & {*arguments}:
        models = itertools.groupby(rows(), lambda row: row["model"])
        recipes = "\n\n".join(", ".join(row["recipe"] for row in of_model) for _, of_model in models)
        alone = dataclasses.make_dataclass("Arguments", [("options", Annotated[options, UNNAMED])])
        alone.__doc__ = (
            f"{purpose.format('a recipe')}\n\nExample: {usage}\n\nBelow are the options for any recipe. Its fields are "
            f"options too: `{program} RECIPE --help` lists them and their values. Recipes (`python -m pretrain "
            f"recipes` describes them; --recipe FILE.json reads one from a file):\n\n{recipes}"
        )
        parse(alone, ["--help"], f"{program} RECIPE")
    if not named:
        raise UserError(f"{program.split()[-1]}: name a recipe first, or give --recipe FILE.json, as in `{usage}`")
    doing(IMPORTING)
    from pretrain.recipe import Recipe, read_recipe
    from pretrain.recipes.registry import find

    if name == "--recipe":
        name, recipe, rest = f"--recipe {file}", read_recipe(place(file)), rest[1:]
    else:
        recipe = find(name)
    recipe_field = "recipe", Annotated[Recipe, UNNAMED], dataclasses.field(default=recipe)
    fields = [("options", Annotated[options, UNNAMED]), recipe_field]
    both = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    both.__doc__ = purpose.format(f"{name} ({recipe.source})")
    try:
        parsed = parse(both, rest, f"{program} {name}")
    except ValueError as error:  # from the checks of a config
        raise UserError(str(error)) from None
    _check_pattern(recipe.model, parsed.recipe.model)
    return parsed.recipe, parsed.options


def _check_pattern(before, after) -> None:
    """Raise UserError if an option sets a field that the model's sparse pattern does not use. With --model.pattern.name
    alone, fields of the recipe's former pattern are left over; those are ignored."""
    if not hasattr(after, "pattern"):
        return
    from models.attention.patterns.pattern import fields_of

    name = after.pattern.name
    for field in dataclasses.fields(after.pattern):
        value, used = getattr(after.pattern, field.name), fields_of(name)
        if field.name not in ("name", *used) and value != getattr(before.pattern, field.name):
            known = f"whose fields are {', '.join(used)}" if used else "which has no fields"
            raise UserError(
                f"model.pattern.{field.name}={list(value) if isinstance(value, tuple) else value}: has no effect with "
                f"model.pattern.name={name}, {known}; leave it out, or choose another pattern"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(How):
    """The TPU slice and the settings to plan a recipe for."""

    topology: str
    """TPU slice: GENERATION:SHAPE like v5e:4x4, or Google Cloud's name like v5litepod-16."""
    batch_size: int | None = None
    """Global batch size in rows, for every phase; by default the recipe's."""
    sequence_length: int | None = None
    """Sequence length in tokens, for every phase; by default the recipe's."""
    largest: bool = True
    """Also find the largest batch size that fits, with two or three more compilations per phase."""
    cache: Path = CACHE
    """Folder that keeps the compiler's results."""


def parse_target(arguments: Sequence[str]) -> tuple["Recipe", Target]:
    """Parse `RECIPE --topology v5e:4x4` -> (the recipe with its changes, the target)."""
    usage = "python -m tpu plan bert-base --topology v5e:4x4"
    purpose = "Compile the train step of {} for a TPU slice, on this machine, and print its memory and speed."
    return parse_recipe(arguments, Target, usage, purpose)
