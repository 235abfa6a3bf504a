"""Make the recipes of one paper."""

from typing import Any, NamedTuple

from models.core.family import Family
from pretrain.objectives.objective import Objective, Phase
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.schedules import Schedule

# Schedules of sizes that train in minutes on a CPU
MINUTES, COSINE_MINUTES = Schedule(peak=1e-3, warmup=0.1), Schedule("cosine", peak=1e-3, warmup=0.1)


class Paper(NamedTuple):
    """What a paper's recipes share.   name: prefix of their names, before the size.   source: authors and year.
    objective, optimizer: of most sizes."""

    name: str
    source: str
    family: Family
    objective: Objective
    optimizer: Optimizer = Optimizer()

    def recipe(self, size: str, schedule: Schedule, steps: int, *phases: Phase, **others: Any) -> Recipe:
        """Make the recipe of one size.   others: fields that differ from the paper's."""
        model = others.pop("model", None) or self.family.sizes[size]
        fields = {"source": self.source, "model": model, "objective": self.objective, "optimizer": self.optimizer}
        return Recipe(f"{self.name}-{size}", schedule=schedule, steps=steps, phases=phases, **fields | others)
