"""The command line of `run`, `pattern` and `tpu plan`: a recipe, then any field of it or of the command's options.

Recipes are imported where they are needed: their models import JAX, which takes seconds, and --help needs none.
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
    """A recipe's name, or --recipe and its file, then any of its fields and of a command's own options -> both.

    usage: an example, 'python -m PROGRAM COMMAND RECIPE ...'.   purpose: for --help, with {} for the recipe.
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
            f"options too: `{program} RECIPE --help` lists them with its values. Recipes (`python -m pretrain recipes` "
            f"says more; --recipe FILE.json takes another):\n\n{recipes}"
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
    ours = "recipe", Annotated[Recipe, UNNAMED], dataclasses.field(default=recipe)
    fields = [("options", Annotated[options, UNNAMED]), ours]
    both = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    both.__doc__ = purpose.format(f"{name} ({recipe.source})")
    try:
        parsed = parse(both, rest, f"{program} {name}")
    except ValueError as error:  # a config's own check
        raise UserError(str(error)) from None
    _check_pattern(recipe.model, parsed.recipe.model)
    return parsed.recipe, parsed.options


def _check_pattern(before, after) -> None:
    """UserError where an option sets a field that the model's sparse pattern does not read.

    Only what is given is refused: with --model.pattern.name alone, fields of the recipe's own pattern stay unread.
    """
    if not hasattr(after, "pattern"):
        return
    from models.attention.patterns.pattern import fields_of

    name = after.pattern.name
    for field in dataclasses.fields(after.pattern):
        value, read = getattr(after.pattern, field.name), fields_of(name)
        if field.name not in ("name", *read) and value != getattr(before.pattern, field.name):
            known = f"its fields are {', '.join(read)}" if read else "it has no fields"
            raise UserError(
                f"model.pattern.{field.name}={list(value) if isinstance(value, tuple) else value}: has no effect with "
                f"model.pattern.name={name}, {known}; leave it out, or choose another name"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(How):
    """What a recipe is planned for."""

    topology: str
    """A slice: GENERATION:SHAPE like v5e:4x4, or Google Cloud's name like v5litepod-16."""
    batch_size: int | None = None
    """Rows of every phase's batch, over all devices."""
    sequence_length: int | None = None
    """Tokens per row, in every phase."""
    largest: bool = True
    """Also find the largest batch that fits: two or three more compilations for each phase."""
    cache: Path = CACHE
    """Where the compiler's answers are kept."""


def parse_target(arguments: Sequence[str]) -> tuple["Recipe", Target]:
    """`RECIPE --topology v5e:4x4` -> the recipe with its changes, and what to plan it for."""
    usage = "python -m tpu plan bert-base --topology v5e:4x4"
    purpose = "Compile the train step of {} for a slice of TPUs, on this machine, and say what it will do."
    return parse_recipe(arguments, Target, usage, purpose)
