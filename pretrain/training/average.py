"""The mean of the weights of a run's last checkpoints (Vaswani et al. 2017, arXiv:1706.03762, section 6.1)."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from pretrain.recipe import Recipe, tasks_of
from pretrain.storage.checkpoints import phase_of
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import same_training
from pretrain.training.opened import Opened, open_model, restore


def open_mean(source: Path, number: int, step: int | None = None, mesh: Mesh | None = None) -> Opened:
    """Open a run with the mean of the parameters of its last `number` checkpoints, those up to `step` if given. Each
    checkpoint's low-rank products are merged first. Sums are float64. UserError if fewer checkpoints are kept, if one
    is damaged, or if their phases do not train the same."""
    directory = RunDirectory(source)
    kept = [at for at in directory.checkpoint_steps() if step is None or at <= step]
    steps = tuple(kept[-number:])
    newest = open_model(source, steps[-1] if step is None and steps else step, mesh)
    if newest.run is None:
        raise UserError(
            f"--average {number}: {source} is a Hugging Face folder, which has no checkpoints; leave it out"
        )
    if len(steps) < number:
        raise UserError(
            f"--average {number}: {source} has {len(kept)} checkpoints to average (of steps "
            f"{', '.join(map(str, kept))}); give a smaller number, or train with a larger --keep"
        )
    for at in steps:
        phase = phase_of(directory.checkpoints / str(at), newest.recipe)
        if not _alike(newest.recipe, phase, newest.run.phase):
            raise UserError(
                f"--average {number}: phase {phase + 1}, of the checkpoint of step {at}, trains other parameters or "
                f"tasks than phase {newest.run.phase + 1}, of step {steps[-1]}; give a smaller number"
            )
    total = jax.tree.map(lambda leaf: np.array(leaf, np.float64), newest.params)
    for at in steps[:-1]:
        jax.tree.map(lambda so_far, leaf: np.add(so_far, leaf, out=so_far), total, restore(directory, at, mesh).whole)
    mean = jax.tree.map(lambda so_far, leaf: (so_far / number).astype(leaf.dtype), total, newest.params)
    return newest._replace(params=mean, averaged=steps)


def _alike(recipe: Recipe, one: int, other: int) -> bool:
    """Return whether two phases train the same parameters by the same tasks."""
    tasks = [tasks_of(recipe, recipe.phases[index]) for index in (one, other)]
    return tasks[0] == tasks[1] and same_training(recipe, one, other)
