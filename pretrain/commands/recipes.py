"""`python -m pretrain recipes`: list the recipes, from a file, since importing and counting models takes seconds.

`python -m pretrain.commands.recipes` rewrites that file.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from data_pipelines.command_line import parse
from pretrain.commands.common import wide_console

FILE = Path(__file__).parent.parent / "recipes" / "table.json"
OF_VOCABULARY = {"vocab", "cluster"}  # axes whose size depends on the vocabulary
# Columns whose title differs from their key
TITLES = {"body": "parameters\nwithout\nvocabulary", "published": "with the\npaper's\nvocabulary"}


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes: model, parameters, objective, source."""

    json: str | None = None
    """Print this recipe as JSON, to edit and pass to `run --recipe`."""


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


def rows() -> list[dict[str, str]]:
    """Read the table: for each recipe, column -> text."""
    return json.loads(FILE.read_text())


def row(recipe) -> dict[str, str]:
    """Describe a `Recipe`: column -> text."""
    import jax

    from models.core.parameters import count, leaves, nest
    from models.core.program import Program
    from pretrain.training.assembly import assemble, initial_params

    assembly = assemble(recipe, Program())  # the default program is the fastest to trace
    params = jax.eval_shape(lambda: initial_params(assembly))
    of_vocabulary = {parameter.path for parameter in assembly.table if OF_VOCABULARY & {*parameter.axes}}
    body = nest({path: leaf for path, leaf in leaves(params) if path not in of_vocabulary})
    return {
        "recipe": recipe.name,
        "model": type(recipe.model).__name__.removesuffix("Config"),
        "body": f"{count(body) / 1e6:.1f}M",
        "published": f"{count(params) / 1e6:.1f}M ({recipe.model.vocab_size:,})",
        "objective": type(recipe.objective).__name__,
        "phases": ", ".join(f"{phase.batch_size} x {phase.length}" for phase in recipe.phases),
        "steps": f"{recipe.steps:,}",
        "source": recipe.source,
    }


if __name__ == "__main__":
    from pretrain.recipes.registry import RECIPES

    FILE.write_text(json.dumps([row(recipe) for recipe in RECIPES.values()], indent=1) + "\n")
