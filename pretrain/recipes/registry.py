"""All recipes by name, collected from the lists RECIPES of the files in this folder."""

import difflib
import pkgutil
from importlib import import_module

from data_pipelines.errors import UserError
from pretrain import recipes
from pretrain.recipe import Recipe

_FILES = [import_module(f"{recipes.__name__}.{file.name}") for file in pkgutil.iter_modules(recipes.__path__)]
RECIPES: dict[str, Recipe] = {recipe.name: recipe for file in _FILES for recipe in getattr(file, "RECIPES", ())}


def find(name: str) -> Recipe:
    """Find the recipe of this name; UserError with the nearest names if there is none."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=3) or sorted(RECIPES)
    raise UserError(f"no recipe {name!r}: did you mean {', '.join(near)}? `python -m pretrain recipes` lists all")
