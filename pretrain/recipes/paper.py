"""What the recipes of one paper have in common."""

from typing import Any, NamedTuple

from models.core.family import Family
from pretrain.objectives.objective import Objective, Phase
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.schedules import Schedule

# Of sizes that train within minutes on a CPU
MINUTES, COSINE_MINUTES = Schedule(peak=1e-3, warmup=0.1), Schedule("cosine", peak=1e-3, warmup=0.1)


class Paper(NamedTuple):
    """name: of the model, before a recipe's size.   source: authors and year.   objective, optimizer: of most sizes."""

    name: str
    source: str
    family: Family
    objective: Objective
    optimizer: Optimizer = Optimizer()

    def recipe(self, size: str, schedule: Schedule, steps: int, *phases: Phase, **others: Any) -> Recipe:
        """Of one size.   others: fields of its recipe that are not the paper's."""
        model = others.pop("model", None) or self.family.sizes[size]
        fields = {"source": self.source, "model": model, "objective": self.objective, "optimizer": self.optimizer}
        return Recipe(f"{self.name}-{size}", schedule=schedule, steps=steps, phases=phases, **fields | others)
