"""Which checkpoints have the lowest held-out loss, of a run or of one of its tasks."""

import math
from collections.abc import Iterable, Mapping

from pretrain.recipe import Recipe, every_task, phase_after

LOSS = "loss"  # the name of that of the run as a whole; a task has its own
SCORE = "score"  # the figure that counts in place of the loss where an evaluation has it: more is better


def losses(recipe: Recipe, figures: Mapping[str, float]) -> dict[str, float]:
    """Of an evaluation's figures the losses, by name, that are numbers; scores as negative ones."""
    wanted = {LOSS: ""} | {task.name: f"{task.name}/" for _, _, task in every_task(recipe) if task.name}
    loss = lambda place: figures.get(f"{place}{LOSS}", math.nan)
    found = {name: -figures.get(f"{place}{SCORE}", -loss(place)) for name, place in wanted.items()}
    return {name: loss for name, loss in found.items() if math.isfinite(loss)}


def best(recipe: Recipe, evaluations: Mapping[int, Mapping[str, float]], steps: Iterable[int]) -> dict[str, int]:
    """For each loss, by name, which of some steps has the lowest one, the first of several. Of steps of several phases,
    whose held-out rows differ, those of the last are compared.

    evaluations: step -> `losses` of the state after so many steps.
    """
    measured: dict[str, list[int]] = {}
    for step in sorted(steps):
        for name in evaluations.get(step, ()):
            measured.setdefault(name, []).append(step)
    ranked = lambda name, step: (-phase_after(recipe, step), evaluations[step][name])
    return {name: min(of, key=lambda step, name=name: ranked(name, step)) for name, of in measured.items()}


def is_enough(recipe: Recipe, evaluations: Mapping[int, Mapping[str, float]], patience: int) -> bool:
    """Whether so many evaluations of the run, 0 for any number, have come after its best one."""
    steps = best(recipe, evaluations, evaluations)
    return LOSS in steps and 0 < patience <= sum(step > steps[LOSS] for step in evaluations)
