"""`python -m pretrain pattern`: what sees what in a recipe's sparse pattern, as a picture and in words."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pretrain.commands.arguments import parse_recipe

USAGE = "python -m pretrain pattern bert-base --out pattern.png --model.pattern.name bigbird"


@dataclasses.dataclass(frozen=True)
class Shown:
    """What to show of a recipe's pattern."""

    out: Path
    """The PNG (or PDF, SVG) file to write."""
    length: int | None = None
    """Tokens of a row; by default those of the longest phase."""
    layer: int | None = None
    """This layer alone, from 0."""
    head: int | None = None
    """This head alone, from 0."""


def main(arguments: Sequence[str]) -> int:
    recipe, shown = parse_recipe(arguments, Shown, USAGE, "Draw what sees what in the sparse pattern of {}.")
    from pretrain.commands.pattern_picture import show_pattern

    show_pattern(recipe, shown)
    return 0
