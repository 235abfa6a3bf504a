"""All recipes by name: the RECIPES of every file beside this one that has some."""

import difflib
import pkgutil
from importlib import import_module

from data_pipelines.errors import UserError
from pretrain import recipes
from pretrain.recipe import Recipe

_FILES = [import_module(f"{recipes.__name__}.{file.name}") for file in pkgutil.iter_modules(recipes.__path__)]
RECIPES: dict[str, Recipe] = {recipe.name: recipe for file in _FILES for recipe in getattr(file, "RECIPES", ())}


def find(name: str) -> Recipe:
    """The recipe of this name; UserError with the nearest names."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=3) or sorted(RECIPES)
    raise UserError(f"no recipe {name!r}: did you mean {', '.join(near)}? `python -m pretrain recipes` lists all")
