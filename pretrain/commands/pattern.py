"""`python -m pretrain pattern`: draw and describe a recipe's sparse attention pattern."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pretrain.commands.arguments import parse_recipe

USAGE = "python -m pretrain pattern bert-base --out pattern.png --model.pattern.name bigbird"


@dataclasses.dataclass(frozen=True)
class Shown:
    """Which part of a recipe's sparse pattern to draw, and where."""

    out: Path
    """PNG, PDF or SVG file to write."""
    length: int | None = None
    """Sequence length in tokens; by default that of the longest phase."""
    layer: int | None = None
    """Draw only this layer, from 0; by default all."""
    head: int | None = None
    """Draw only this head, from 0; by default all."""


def main(arguments: Sequence[str]) -> int:
    recipe, shown = parse_recipe(arguments, Shown, USAGE, "Draw the sparse attention pattern of {}.")
    from pretrain.commands.pattern_picture import show_pattern

    show_pattern(recipe, shown)
    return 0
