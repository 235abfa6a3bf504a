"""A run's parameters for reading: evaluation, export, starting another run from it."""

from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from data_pipelines.cloud import in_cloud
from data_pipelines.errors import UserError
from models import program as programs
from models.parameters import Params
from pretrain.assembly import Assembly, assemble
from pretrain.checkpoints import NOT_READ, Checkpoints
from pretrain.placement import abstract_state
from pretrain.recipe import phase_at
from pretrain.run_directory import RunDirectory
from pretrain.step import TrainState
from tpu.mesh import row_mesh


class Restored(NamedTuple):
    """What a finished or running run has learned by a step, read from its directory."""

    assembly: Assembly
    step: int
    params: Params
    frozen: Params
    mesh: Mesh


def restore(directory: RunDirectory, step: int | None = None, devices: list[jax.Device] | None = None) -> Restored:
    """The parameters of a step, by default of the newest checkpoint; UserError when there is none that loads.

    They lie whole on each of the mesh's devices: as many as divide the batches of the run's phases.
    devices: to choose from, by default this process's.
    """
    recipe = directory.read_recipe()
    assembly = assemble(recipe, programs.default())
    mesh = row_mesh(devices or jax.local_devices(), [phase.batch_size for phase in recipe.phases])
    checkpoints = Checkpoints(directory.checkpoints)
    try:
        state = checkpoints.restore(lambda at: _parameters_after(assembly, at, mesh), step)
    finally:
        checkpoints.close()
    if state is None:
        raise UserError(f"{directory.path} has no checkpoint yet: let `python -m pretrain run` write one")
    return Restored(assembly, int(state.step), state.params, load_frozen(assembly, directory, mesh), mesh)


def state_after(assembly: Assembly, step: int, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state after `step` steps."""
    phase = phase_at(assembly.recipe, max(step - 1, 0))  # the carry is that of the last batch
    return abstract_state(assembly, phase, mesh)[0]


def _parameters_after(assembly: Assembly, step: int, mesh: Mesh) -> TrainState:
    """`state_after` without what only training needs: moments and memories may be many times the parameters."""
    state = state_after(assembly, step, mesh)
    unread = lambda tree: jax.tree.map(lambda _: NOT_READ, tree)
    return state._replace(opt_state=unread(state.opt_state), carry=unread(state.carry))


def save_frozen(directory: RunDirectory, frozen: Params) -> None:
    """Write the frozen parameters, once: they are in no checkpoint."""
    if frozen:
        with ocp.StandardCheckpointer() as writer:
            writer.save(_frozen_folder(directory), frozen, force=True)


def load_frozen(assembly: Assembly, directory: RunDirectory, mesh: Mesh) -> Params:
    """The frozen parameters of a run, mostly {}."""
    _, like = abstract_state(assembly, 0, mesh)
    if not like:
        return {}
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(_frozen_folder(directory), like)


def _frozen_folder(directory: RunDirectory) -> Path:
    folder = directory.path / "frozen"
    return folder if in_cloud(folder) else folder.absolute()
