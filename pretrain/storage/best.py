"""Which checkpoints have the lowest held-out loss, of a run or of one of its tasks."""

import math
from collections.abc import Iterable, Mapping

from pretrain.recipe import Recipe, every_task, phase_after

LOSS = "loss"  # the name of the best of the run as a whole


def best(recipe: Recipe, evaluations: Mapping[int, Mapping[str, float]], steps: Iterable[int]) -> dict[str, int]:
    """For `loss`, and for each task by its name, which of some steps has the lowest one, the first of several; a name
    without any is left out. Of steps of several phases, whose held-out rows differ, those of the last are compared.

    evaluations: step -> the figures of the state after so many steps.
    """
    figures, found = {LOSS: LOSS}, {}
    figures |= {task.name: f"{task.name}/{LOSS}" for _, _, task in every_task(recipe) if task.name}
    for name, figure in figures.items():
        losses = {step: evaluations.get(step, {}).get(figure, math.nan) for step in sorted(steps)}
        measured = [step for step, loss in losses.items() if math.isfinite(loss)]
        if measured:
            found[name] = min(measured, key=lambda step: (-phase_after(recipe, step), losses[step]))
    return found
