"""A run's parameters for reading: evaluation, export, starting another run from it. The work directory stays as it is.

The run may go on meanwhile: what it has deleted since its checkpoints were listed is no damage.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from data_pipelines.cloud import in_cloud
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from models.core import program as programs
from models.core.parameters import Params
from pretrain.recipe import phase_after
from pretrain.state import TrainState
from pretrain.storage.checkpoints import newest_intact
from pretrain.storage.run_directory import RunDirectory
from pretrain.storage.stored_state import NOT_READ, Damaged, load, patiently, phase_of, verified
from pretrain.training.assembly import Assembly
from pretrain.training.placement import Stage, any_task, load_of
from pretrain.training.prepare import place_on, prepare
from tpu.mesh import device_memory, reading_mesh

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a finished or running run has learned by a step, read from its directory."""

    assembly: Assembly
    step: int
    params: Params
    frozen: Params
    mesh: Mesh
    stages: list[Stage]


def restore(directory: RunDirectory, step: int | None = None, mesh: Mesh | None = None) -> Restored:
    """The parameters of a step, by default of the newest checkpoint; UserError when there is none that loads.

    mesh: where they lie as in training, by default on as many of this process's devices as divide the batches of the
    run's phases, cut over them where training would cut them.
    """
    doing(f"restoring {directory.path}")
    prepared = prepare(directory.read_recipe())
    recipe, shapes = prepared
    work = load_of(recipe, shapes, jax.local_devices(), device_memory())
    if mesh is None:
        mesh = reading_mesh(jax.local_devices(), [phase.batch_size for phase in recipe.phases], work)
    placed = place_on(prepared, mesh, programs.default(), work)

    def read(at: int) -> TrainState:
        like = _parameters_after(placed.stages, directory, at)
        return verified(*load(directory.checkpoints / str(at), like), like)

    state = _newest(directory, step, read)
    if state is None:
        raise UserError(f"{directory.path} has no checkpoint yet: let `python -m pretrain run` write one")
    frozen = load_frozen(placed.stages[0], directory)
    return Restored(placed.assembly, int(state.step), state.params, frozen, mesh, placed.stages)


def warn_beyond_trained(restored: Restored, length: int) -> None:
    """Say so where a text of this length, or an export, has positions that no row of the run had."""
    recipe = restored.assembly.recipe
    phases = recipe.phases[: phase_after(recipe, restored.step) + 1]
    longest = max(phase.length for phase in phases)
    if longest < length <= getattr(recipe.model, "positions", 0):
        log.warning(
            "this run trained rows of up to %s tokens only: the model's positions %s to %s are untrained",
            f"{longest:,}",
            f"{longest:,}",
            f"{length - 1:,}",
        )


def _newest(directory: RunDirectory, step: int | None, read: Callable[[int], TrainState]) -> TrainState | None:
    steps = directory.checkpoint_steps()
    try:
        state, damaged = newest_intact(directory.checkpoints, steps, step, read)
    except UserError:
        if step is None and not set(steps) & set(directory.checkpoint_steps()):
            return _newest(directory, step, read)  # a running run has replaced them all
        raise
    for at, reason in damaged.items():
        if at in directory.checkpoint_steps():
            log.warning("checkpoint of step %d is damaged (%s): that of step %d is read", at, reason, state.step)
    return state


def state_after(made: Sequence[Stage], directory: RunDirectory, step: int) -> TrainState:
    """Shapes, dtypes and shardings of the state that a run's checkpoint of a step holds."""
    recorded = phase_of(directory.checkpoints / str(step))
    phase = phase_after(made[0].assembly.recipe, step) if recorded is None else recorded
    return any_task(made, phase).state


def _parameters_after(made: Sequence[Stage], directory: RunDirectory, step: int) -> TrainState:
    """`state_after` without what only training needs: moments and memories may be many times the parameters."""
    state = state_after(made, directory, step)

    def unread(tree):
        return jax.tree.map(lambda _: NOT_READ, tree)

    return state._replace(opt_state=unread(state.opt_state), carry=unread(state.carry))


def save_frozen(directory: RunDirectory, frozen: Params) -> None:
    """Write the frozen parameters, once: they are in no checkpoint."""
    if frozen:
        with ocp.StandardCheckpointer() as writer:
            writer.save(_frozen_folder(directory), frozen, force=True)


def load_frozen(stage: Stage, directory: RunDirectory) -> Params:
    """The frozen parameters of a run, mostly {}."""
    if not stage.frozen:
        return {}
    folder = _frozen_folder(directory)
    with ocp.StandardCheckpointer() as reader:
        try:
            return patiently(folder, lambda: reader.restore(folder, stage.frozen))
        except Damaged as error:
            raise UserError(f"{folder} is damaged ({error}): restore it from a copy") from error


def _frozen_folder(directory: RunDirectory) -> Path:
    folder = directory.path / "frozen"
    return folder if in_cloud(folder) else folder.absolute()
