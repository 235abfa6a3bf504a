"""The table of `python -m pretrain recipes`, from a file: to import and count the models takes seconds.

`python -m pretrain.recipes.table` writes that file anew.
"""

import json
from pathlib import Path

from rich.console import Console

FILE = Path(__file__).with_name("table.json")
OF_VOCABULARY = {"vocab", "cluster"}  # axes that grow with it
# Columns whose name is another than their key
TITLES = {"body": "parameters\nwithout the\nvocabulary's", "published": "with those of\nthe paper's"}


def rows() -> list[dict[str, str]]:
    """Of each recipe, text by column."""
    return json.loads(FILE.read_text())


def wide_console() -> Console:
    """Wide where nobody set a width, so that a pipe or a log gets whole rows."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def row(recipe) -> dict[str, str]:
    """A `Recipe` as text by column."""
    import jax

    from models.core.parameters import count, leaves, nest
    from models.core.program import Program
    from pretrain.training.assembly import assemble, initial_params

    assembly = assemble(recipe, Program())  # traced fastest, however deep it is
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
