"""The command line of `run`: a recipe's name or file, then any field of the recipe or of the options."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, TypeVar

from tyro.conf import arg

from data_pipelines.cloud import place
from data_pipelines.command_line import parse
from data_pipelines.errors import UserError
from models.attention.patterns.pattern import fields_of
from pretrain.options import Options
from pretrain.recipe import Recipe, read_recipe
from pretrain.recipes.registry import RECIPES, find

Own = TypeVar("Own")


def parse_run(arguments: Sequence[str]) -> tuple[Recipe, Options]:
    """`bert-tiny --corpus DIR --workdir DIR --model.depth 3` -> the recipe with its changes, and the options."""
    usage = "python -m pretrain run bert-tiny --corpus DIR --workdir DIR"
    for index, argument in enumerate(arguments):
        if argument.split("=")[0].replace("_", "-") == "--model.vocab-size":
            given = " ".join(arguments[index : index + 1 + ("=" not in argument)])
            raise UserError(
                f"{given}: the vocabulary is the corpus's; leave this out, and prepare the corpus with --vocab-size"
            )
    return parse_recipe(arguments, Options, usage, "Train {}, or go on in the same --workdir.")


def parse_recipe(arguments: Sequence[str], options: type[Own], usage: str, purpose: str) -> tuple[Recipe, Own]:
    """A recipe's name, or --recipe and its file, then any of its fields and of a command's own options -> both.

    usage: an example, 'python -m PROGRAM COMMAND RECIPE ...'.   purpose: for --help, with {} for the recipe.
    """
    program = " ".join(usage.split()[:4])
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        name, rest = next(iter(RECIPES)), ["--help"]
    if name == "--recipe" and rest:
        file, *rest = rest
        name, recipe = f"--recipe {file}", read_recipe(place(file))
    elif not name or name.startswith("-"):
        raise UserError(f"{program.split()[-1]}: name a recipe first, or give --recipe FILE.json, as in `{usage}`")
    else:
        recipe = find(name)
    unnamed = arg(name="")  # --steps, not --recipe.steps
    both = dataclasses.make_dataclass(
        "Arguments",
        [
            ("options", Annotated[options, unnamed]),
            ("recipe", Annotated[Recipe, unnamed], dataclasses.field(default=recipe)),
        ],
        frozen=True,
    )
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
    name = after.pattern.name
    for field in dataclasses.fields(after.pattern):
        value, read = getattr(after.pattern, field.name), fields_of(name)
        if field.name not in ("name", *read) and value != getattr(before.pattern, field.name):
            its = f"its fields are {', '.join(read)}" if read else "it has no fields"
            raise UserError(
                f"model.pattern.{field.name}={list(value) if isinstance(value, tuple) else value}: has no effect with "
                f"model.pattern.name={name}, {its}; leave it out, or choose another name"
            )
