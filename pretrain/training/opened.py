"""Open a trained model: a run at one of its checkpoints, or a Hugging Face folder.

The work directory is only read, and the run may continue: a checkpoint that it deletes meanwhile is not damaged.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from data_pipelines.cloud import is_file, local_folder
from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from data_pipelines.progress import doing
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import Made
from models.core import program as programs
from models.core.parameters import Params, leaves, nest
from models.families.registry import family_of, name_of
from pretrain.huggingface.config import config_from, folders, heads_in_folder, listed_parts
from pretrain.huggingface.load import load
from pretrain.lora import merged
from pretrain.objectives.objective import Objective, initialise
from pretrain.objectives.protocols import CausalDecoder
from pretrain.optimizers import mean_weights
from pretrain.recipe import Recipe, tasks_of
from pretrain.storage.best import best, losses
from pretrain.storage.checkpoints import NOT_READ, TrainState, load_frozen, newest_intact, phase_of, verified
from pretrain.storage.checkpoints import load as load_state
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import Assembly, in_phase, merge, optimizer_in, same_training
from pretrain.training.placement import Stage, any_task, load_of, place_on
from tpu.mesh import device_memory, reading_mesh, row_mesh
from tpu.rules import parameter_shardings

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """The parameters of a finished or running run at a step, read from its work directory."""

    assembly: Assembly
    step: int
    phase: int  # phase that the checkpoint belongs to
    params: Params
    frozen: Params
    mesh: Mesh
    stages: list[Stage]

    @property
    def whole(self) -> Params:
        """Return all parameters of the model, with low-rank products merged."""
        return merged(merge(self.params, self.frozen))


def restore(
    directory: RunDirectory,
    step: int | None = None,
    mesh: Mesh | None = None,
    best_of: str | None = None,
    ema: bool = False,
) -> Restored:
    """Restore the parameters of a step, by default of the newest checkpoint; UserError if none loads.

    best_of: restore the first of `best_steps` instead.   ema: restore the running mean of the weights.   mesh: for the
    parameters; by default as many of this process's devices as divide the batches of the run's phases.
    """
    doing(f"restoring {directory.path}")
    recipe = directory.read_recipe()
    work = load_of(recipe, jax.local_devices(), device_memory())
    if mesh is None:
        mesh = reading_mesh(jax.local_devices(), [phase.batch_size for phase in recipe.phases], work)
    placed = place_on(recipe, mesh, programs.default(), work)

    phases = {}  # step -> phase of the checkpoints that were read

    def read(at: int) -> TrainState:
        phases[at] = phase_of(directory.checkpoints / str(at), recipe)
        if ema and not optimizer_in(recipe, phases[at]).ema:
            raise UserError(f"--ema: {directory.path} was trained without optimizer.ema; leave it out")
        like = _parameters_alone(any_task(placed.stages, phases[at]).state, ema)
        return verified(*load_state(directory.checkpoints / str(at), like), like)

    state = _intact(directory, step, best_of, read)
    if state is None:
        raise UserError(f"{directory.path}: has no checkpoint yet; let `python -m pretrain run` write one")
    frozen = load_frozen(directory.frozen, placed.stages[0].frozen)
    at, params = int(state.step), state.params
    if ema:
        if not int(state.opt_state[-1].count):
            raise UserError(f"--ema: no step of its phase is done in the checkpoint of step {at}; give another --step")
        means = mean_weights(optimizer_in(recipe, phases[at]), state.opt_state)
        params = nest(dict(leaves(params)) | dict(leaves(means)))  # without those that the phase freezes
    return Restored(in_phase(placed.assembly, phases[at]), at, phases[at], params, frozen, mesh, placed.stages)


def _intact(
    directory: RunDirectory, step: int | None, best_of: str | None, read: Callable[[int], TrainState]
) -> TrainState | None:
    """Read the state of the newest (or best) checkpoint that is not damaged."""
    steps = directory.checkpoint_steps() if best_of is None else best_steps(directory, best_of)[::-1]
    try:
        state, damaged = newest_intact(directory.checkpoints, steps, step, read)
    except UserError:
        if step is None and not set(steps) & set(directory.checkpoint_steps()):
            return _intact(directory, step, best_of, read)  # the run has replaced all of them meanwhile
        raise
    for at, reason in damaged.items():
        if at in directory.checkpoint_steps():
            log.warning("checkpoint of step %d is damaged (%s): reading step %d instead", at, reason, state.step)
    return state


def _parameters_alone(state: TrainState, ema: bool) -> TrainState:
    """Leave out what only training needs: optimizer state and carry may be many times larger than the parameters.
    ema: keep the running mean of the weights."""

    def unread(tree):
        return jax.tree.map(lambda _: NOT_READ, tree)

    moments = unread(state.opt_state)
    if ema:
        moments = (*moments[:-1], state.opt_state[-1])
    return state._replace(opt_state=moments, carry=unread(state.carry))


class Opened(NamedTuple):
    """A trained model.   params: of the module, including frozen ones, on the mesh.   tokenizer_folder: may be gs://.
    run: None for a Hugging Face folder.   averaged: steps of the checkpoints whose mean the parameters are, if any.
    ema: whether they are the running mean of a run's weights."""

    source: Path
    module: nn.Module
    params: Params
    mesh: Mesh
    tokenizer: Made
    tokenizer_folder: Path
    run: Restored | None = None
    averaged: tuple[int, ...] = ()
    ema: bool = False

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def recipe(self) -> Recipe | None:
        return self.run and self.run.assembly.recipe

    @property
    def objectives(self) -> list[Objective]:
        """Those of the tasks of the phase which the run has come to; none of a Hugging Face folder."""
        tasks = tasks_of(self.recipe, self.recipe.phases[self.run.phase]) if self.run else ()
        return [task.objective for task in tasks]

    @property
    def objective(self) -> Objective | None:
        """The first of them."""
        return next(iter(self.objectives), None)

    @property
    def step(self) -> int | None:
        return self.run and self.run.step

    @property
    def name(self) -> str:
        """Name in titles."""
        return str(self.source) if self.step is None else f"{self.source} at step {self.step}"

    def at(self, restored: Restored) -> "Opened":
        """Return the same run at another checkpoint."""
        return self._replace(params=restored.whole, run=restored)

    def check_decodes(self) -> None:
        """Raise UserError unless the model is a causal decoder."""
        if not isinstance(self.module, CausalDecoder):
            raise UserError(f"{self.source}: a {name_of(self.config)} model is no causal decoder; use one, like gpt2")

    def warn_beyond_trained(self, length: int) -> None:
        """Warn if a text of this length, or an export, uses positions beyond the run's longest rows."""
        if self.run is None or RunDirectory(self.source).read_run()["init_from"]:  # earlier rows may have been longer
            return
        if not any("position" in row.axes for row in family_of(self.recipe.model).table(self.recipe.model)):
            return  # sinusoids need no training
        longest = max(phase.length for phase in self.recipe.phases[: self.run.phase + 1])
        if longest < length <= getattr(self.recipe.model, "positions", 0):
            first, last = f"{longest:,}", f"{length - 1:,}"
            message = "this run trained on rows of at most %s tokens: the model's positions %s to %s are untrained"
            log.warning(message, first, first, last)


def open_model(
    source: Path, step: int | None = None, mesh: Mesh | None = None, best_of: str | None = None, ema: bool = False
) -> Opened:
    """Open the model in a work directory, or in a Hugging Face folder written by `export` or transformers.

    step, best_of: checkpoint of a run: a step, or the first of `best_steps` that loads; by default the newest.
    ema: take the running mean of its weights.   mesh: for the parameters; by default that of `restore` for a run, else
    all of this process's devices with replicated parameters.   UserError if nothing can be read.
    """
    directory = RunDirectory(source)
    if _is_hugging_face(directory):
        if step is not None or best_of is not None or ema:
            option = "--ema" if ema else f"--best {best_of}" if step is None else f"--step {step}"
            raise UserError(f"{option}: {source} is a Hugging Face folder, which has no checkpoints; leave it out")
        doing(f"reading {source}")
        with local_folder(directory.path) as folder:
            return _read(directory.path, folder, mesh or row_mesh(jax.local_devices(), []))
    if best_of is not None and step is not None:
        raise UserError(f"--best {best_of}: cannot be combined with --step {step}; leave one of them out")
    restored = restore(directory, step, mesh, best_of, ema)
    with local_folder(directory.tokenizer) as folder:
        tokenizer = stored.load(folder)
    model = restored.assembly.model
    return Opened(source, model, restored.whole, restored.mesh, tokenizer, directory.tokenizer, restored, ema=ema)


def open_mean(source: Path, number: int, step: int | None = None, mesh: Mesh | None = None) -> Opened:
    """Open a run with the mean of the parameters of its last `number` checkpoints, those up to `step` if given
    (Vaswani et al. 2017, arXiv:1706.03762, section 6.1). Low-rank products are merged first; sums are float64.
    UserError if fewer checkpoints are kept, one is damaged, or their phases do not train the same."""
    directory = RunDirectory(source)
    kept = [at for at in directory.checkpoint_steps() if step is None or at <= step]
    steps = tuple(kept[-number:])
    newest = open_model(source, steps[-1] if step is None and steps else step, mesh)
    if newest.run is None:
        raise UserError(f"--average {number}: {source} is a Hugging Face folder without checkpoints; leave it out")
    if len(steps) < number:
        raise UserError(
            f"--average {number}: {source} has {len(kept)} checkpoints to average (of steps "
            f"{', '.join(map(str, kept))}); give a smaller number, or train with a larger --keep"
        )
    recipe, last = newest.recipe, newest.run.phase
    for at in steps:
        phase = phase_of(directory.checkpoints / str(at), recipe)
        same_tasks = tasks_of(recipe, recipe.phases[phase]) == tasks_of(recipe, recipe.phases[last])
        if not (same_tasks and same_training(recipe, phase, last)):
            raise UserError(
                f"--average {number}: phase {phase + 1}, of the checkpoint of step {at}, trains other parameters or "
                f"tasks than phase {last + 1}, of step {steps[-1]}; give a smaller number"
            )
    total = jax.tree.map(lambda leaf: np.array(leaf, np.float64), newest.params)
    for at in steps[:-1]:
        jax.tree.map(lambda so_far, leaf: np.add(so_far, leaf, out=so_far), total, restore(directory, at, mesh).whole)
    mean = jax.tree.map(lambda so_far, leaf: (so_far / number).astype(leaf.dtype), total, newest.params)
    return newest._replace(params=mean, averaged=steps)


def best_steps(directory: RunDirectory, name: str) -> list[int]:
    """List the steps of evaluated checkpoints by ascending held-out loss, of a task by its name, or of the run by the
    name `loss`. UserError if none was evaluated."""
    recipe, steps = directory.read_recipe(), directory.checkpoint_steps()
    evaluations = {figures["step"]: losses(recipe, figures) for figures in read_metrics(directory, "eval")}
    ever, kept = (best(recipe, evaluations, candidates) for candidates in (evaluations, steps))
    if not ever:
        raise UserError(f"{directory.path}: has no evaluation yet; let its run continue")
    if name not in ever:
        raise UserError(unknown(f"--best: {directory.path} has no evaluation of", name, ever))
    if name not in kept:
        raise UserError(f"--best {name}: no checkpoint of {directory.path} was evaluated; give --step of {steps}")
    if ever[name] != kept[name]:
        message = "--best %s: the lowest loss was at step %d, whose checkpoint was not kept (see --keep-best); "
        log.warning(message + "reading the best one kept, of step %d", name, ever[name], kept[name])
    ranked = []
    while left := best(recipe, evaluations, {*steps} - {*ranked}).get(name):
        ranked.append(left)
    return ranked


def identity_of(source: Path) -> str:
    """Return a string that identifies a model, however long it was trained."""
    directory = RunDirectory(source)
    if not _is_hugging_face(directory):
        return directory.identity()
    return hashlib.sha256(str(source).encode()).hexdigest()[:16]


def _is_hugging_face(directory: RunDirectory) -> bool:
    """Return whether it is a Hugging Face folder and no run; UserError if it is neither."""
    if is_file(directory.recipe):
        return False
    path = directory.path
    if not (listed_parts(path) or is_file(path / "config.json")):
        raise UserError(f"{path}: is neither a run (recipe.json) nor a Hugging Face folder (config.json); give one")
    return True


def _read(source: Path, folder: Path, mesh: Mesh) -> Opened:
    """Open a Hugging Face folder.   folder: its copy on this machine."""
    config = config_from(folder)
    family, heads = family_of(config), heads_in_folder(folder, config)
    module = family.module(config, programs.default(), heads)
    required = {name: entry for name, entry in family.inputs.items() if entry.required}
    spec = {name: Feature((1,) * len(entry.shape), entry.dtype) for name, entry in required.items()}
    shapes = jax.eval_shape(lambda: initialise(jax.random.key(0), module, spec))
    first = next(iter(folders(folder, family).values()))
    params, tokenizer = load(folder, config, shapes, first), stored.load(first)
    placed = jax.device_put(params, parameter_shardings(family.parameters(config, heads), shapes, mesh))
    return Opened(source, module, placed, mesh, tokenizer, first if folder == source else source)
