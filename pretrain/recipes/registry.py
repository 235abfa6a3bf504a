"""All recipes by name."""

import difflib

from data_pipelines.errors import UserError
from pretrain.recipe import Recipe
from pretrain.recipes import (
    albert,
    bert,
    bigbird,
    ctrl,
    electra,
    etc,
    gpt,
    gpt2,
    gpt3,
    longformer,
    roberta,
    transformer_xl,
    xlnet,
)

PAPERS = (albert, bert, bigbird, ctrl, electra, etc, gpt, gpt2, gpt3, longformer, roberta, transformer_xl, xlnet)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for paper in PAPERS for recipe in paper.RECIPES}


def find(name: str) -> Recipe:
    """The recipe of this name; UserError with the nearest names."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=3) or sorted(RECIPES)
    raise UserError(f"no recipe {name!r}: did you mean {', '.join(near)}? `python -m pretrain recipes` lists all")
