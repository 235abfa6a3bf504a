"""The command line of `run`: a recipe's name, then any field of the recipe or of the options."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from tyro.conf import arg

from data_pipelines.command_line import parse
from data_pipelines.errors import UserError
from pretrain.options import Options
from pretrain.recipe import Recipe
from pretrain.recipes.registry import RECIPES, find


def parse_run(arguments: Sequence[str]) -> tuple[Recipe, Options]:
    """`bert-tiny --corpus DIR --workdir DIR --model.depth 3` -> the recipe with its changes, and the options."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        name, rest = next(iter(RECIPES)), ["--help"]
    if not name or name.startswith("-"):
        raise UserError("run: name a recipe first, as in `python -m pretrain run bert-tiny --corpus DIR --workdir DIR`")
    recipe = find(name)
    unnamed = arg(name="")  # --steps, not --recipe.steps
    both = dataclasses.make_dataclass(
        "RunArguments",
        [
            ("options", Annotated[Options, unnamed]),
            ("recipe", Annotated[Recipe, unnamed], dataclasses.field(default=recipe)),
        ],
        frozen=True,
    )
    both.__doc__ = f"Train {name} ({recipe.source}), or go on in the same --workdir."
    try:
        parsed = parse(both, rest, f"python -m pretrain run {name}")
    except ValueError as error:  # a config's own check
        raise UserError(str(error)) from None
    return parsed.recipe, parsed.options
