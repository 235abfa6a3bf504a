"""`python -m pretrain recipes`: what can be trained."""

import dataclasses
from collections.abc import Sequence

from rich.table import Table

from data_pipelines.command_line import parse
from pretrain.recipes.table import TITLES, rows, wide_console


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes: model, parameters, objective, source."""

    json: str | None = None
    """Print this recipe as a file for `run --recipe`, to be edited."""


def main(arguments: Sequence[str]) -> int:
    options = parse(Recipes, arguments, "python -m pretrain recipes")
    if options.json is None:
        table = Table(*(TITLES.get(column, column) for column in rows()[0]))
        for row in rows():
            table.add_row(*row.values())
        wide_console().print(table)
        return 0
    from pretrain.recipe import to_json
    from pretrain.recipes.registry import find

    print(to_json(find(options.json)), end="")
    return 0
