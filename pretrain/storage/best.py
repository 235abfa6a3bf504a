"""Find the checkpoints with the lowest held-out loss, of a run or of one of its tasks."""

import math
from collections.abc import Iterable, Mapping

from pretrain.recipe import Recipe, every_task, phase_after

LOSS = "loss"  # name of the run's loss; a task's loss has the task's name
SCORE = "score"  # metric that replaces the loss if an evaluation has it; higher is better


def losses(recipe: Recipe, figures: Mapping[str, float]) -> dict[str, float]:
    """Select the finite losses of an evaluation's metrics, by name; a score counts as a negative loss."""
    wanted = {LOSS: ""} | {task.name: f"{task.name}/" for _, _, task in every_task(recipe) if task.name}
    loss = lambda place: figures.get(f"{place}{LOSS}", math.nan)
    values = {name: -figures.get(f"{place}{SCORE}", -loss(place)) for name, place in wanted.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def best(recipe: Recipe, evaluations: Mapping[int, Mapping[str, float]], steps: Iterable[int]) -> dict[str, int]:
    """Return the best of some steps for each loss, by name; the first of equal ones. Only steps of the last phase
    count, since the held-out rows of phases differ.   evaluations: step -> `losses` after that many steps."""
    measured: dict[str, list[int]] = {}
    for step in sorted(steps):
        for name in evaluations.get(step, ()):
            measured.setdefault(name, []).append(step)
    ranked = lambda name, step: (-phase_after(recipe, step), evaluations[step][name])
    return {name: min(those, key=lambda step, name=name: ranked(name, step)) for name, those in measured.items()}


def is_enough(recipe: Recipe, evaluations: Mapping[int, Mapping[str, float]], patience: int) -> bool:
    """Return whether `patience` evaluations have come after the best one; never if it is 0."""
    steps = best(recipe, evaluations, evaluations)
    return LOSS in steps and 0 < patience <= sum(step > steps[LOSS] for step in evaluations)
