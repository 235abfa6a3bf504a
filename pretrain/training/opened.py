"""A trained model to be read, whatever it is stored as: a run at one of its checkpoints, or a Hugging Face folder.

A run's work directory stays as it is, and the run may go on meanwhile: what it has deleted since its checkpoints were
listed is no damage.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import Mesh

from data_pipelines.cloud import is_file, local_folder
from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from data_pipelines.progress import doing
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import Made
from models.core import program as programs
from models.core.parameters import Params
from models.families.registry import family_of, name_of
from pretrain.huggingface.config import config_from, folders, heads_in_folder, is_listing
from pretrain.huggingface.load import load
from pretrain.lora import merged
from pretrain.objectives.objective import Objective, initialise
from pretrain.objectives.protocols import CausalDecoder
from pretrain.recipe import Recipe, tasks_of
from pretrain.storage.best import LOSS, best, losses
from pretrain.storage.checkpoints import NOT_READ, TrainState, load_frozen, newest_intact, phase_of, verified
from pretrain.storage.checkpoints import load as load_state
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import Assembly, merge
from pretrain.training.placement import Stage, any_task, load_of, place_on
from tpu.mesh import device_memory, reading_mesh, row_mesh
from tpu.rules import parameter_shardings

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a finished or running run has learned by a step, read from its directory."""

    assembly: Assembly
    step: int
    phase: int  # that wrote it
    params: Params
    frozen: Params
    mesh: Mesh
    stages: list[Stage]

    @property
    def whole(self) -> Params:
        """The model's parameters in its own form."""
        return merged(merge(self.params, self.frozen))


def restore(
    directory: RunDirectory, step: int | None = None, mesh: Mesh | None = None, best_of: str | None = None
) -> Restored:
    """The parameters of a step, by default of the newest checkpoint; UserError when there is none that loads.

    best_of: in place of the newest the first of `best_steps`.
    mesh: where they lie as in training, by default on as many of this process's devices as divide the batches of the
    run's phases, cut over them where training would cut them.
    """
    doing(f"restoring {directory.path}")
    recipe = directory.read_recipe()
    work = load_of(recipe, jax.local_devices(), device_memory())
    if mesh is None:
        mesh = reading_mesh(jax.local_devices(), [phase.batch_size for phase in recipe.phases], work)
    placed = place_on(recipe, mesh, programs.default(), work)

    phases = {}  # of the checkpoints that are read

    def read(at: int) -> TrainState:
        phases[at] = phase_of(directory.checkpoints / str(at), recipe)
        like = _parameters_alone(any_task(placed.stages, phases[at]).state)
        return verified(*load_state(directory.checkpoints / str(at), like), like)

    state = _intact(directory, step, best_of, read)
    if state is None:
        raise UserError(f"{directory.path} has no checkpoint yet: let `python -m pretrain run` write one")
    frozen = load_frozen(directory.frozen, placed.stages[0].frozen)
    at = int(state.step)
    return Restored(placed.assembly, at, phases[at], state.params, frozen, mesh, placed.stages)


def _intact(
    directory: RunDirectory, step: int | None, best_of: str | None, read: Callable[[int], TrainState]
) -> TrainState | None:
    steps = directory.checkpoint_steps() if best_of is None else best_steps(directory, best_of)[::-1]
    try:
        state, damaged = newest_intact(directory.checkpoints, steps, step, read)
    except UserError:
        if step is None and not set(steps) & set(directory.checkpoint_steps()):
            return _intact(directory, step, best_of, read)  # a running run has replaced them all
        raise
    for at, reason in damaged.items():
        if at in directory.checkpoint_steps():
            log.warning("checkpoint of step %d is damaged (%s): that of step %d is read", at, reason, state.step)
    return state


def _parameters_alone(state: TrainState) -> TrainState:
    """Without what only training needs: moments and memories may be many times the parameters."""

    def unread(tree):
        return jax.tree.map(lambda _: NOT_READ, tree)

    return state._replace(opt_state=unread(state.opt_state), carry=unread(state.carry))


class Opened(NamedTuple):
    """params: of the module, with those that were frozen, on the mesh.   tokenizer_folder: of its files, maybe gs://.
    run: what was restored of one; None for a Hugging Face folder."""

    source: Path
    module: nn.Module
    params: Params
    mesh: Mesh
    tokenizer: Made
    tokenizer_folder: Path
    run: Restored | None = None

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def recipe(self) -> Recipe | None:
        return self.run and self.run.assembly.recipe

    @property
    def objectives(self) -> list[Objective]:
        """Those of the tasks of the phase which the run has come to; none of a Hugging Face folder."""
        return (
            [task.objective for task in tasks_of(self.recipe, self.recipe.phases[self.run.phase])] if self.run else []
        )

    @property
    def objective(self) -> Objective | None:
        """The first of them."""
        return next(iter(self.objectives), None)

    @property
    def step(self) -> int | None:
        return self.run and self.run.step

    @property
    def name(self) -> str:
        """For titles."""
        return str(self.source) if self.step is None else f"{self.source} at step {self.step}"

    def at(self, restored: Restored) -> "Opened":
        """The same run at another of its checkpoints."""
        return self._replace(params=restored.whole, run=restored)

    def check_decodes(self) -> None:
        """UserError unless it is a causal decoder."""
        if not isinstance(self.module, CausalDecoder):
            raise UserError(
                f"{self.source}: a model of {name_of(self.config)} is no causal decoder; take one, like gpt2"
            )

    def warn_beyond_trained(self, length: int) -> None:
        """Say so where a text of this length, or an export, has positions that no row of the run had."""
        if self.run is None or RunDirectory(self.source).read_run()["init_from"]:  # whose rows may have been longer
            return
        longest = max(phase.length for phase in self.recipe.phases[: self.run.phase + 1])
        if longest < length <= getattr(self.recipe.model, "positions", 0):
            log.warning(
                "this run trained rows of up to %s tokens only: the model's positions %s to %s are untrained",
                f"{longest:,}",
                f"{longest:,}",
                f"{length - 1:,}",
            )


def open_model(source: Path, step: int | None = None, mesh: Mesh | None = None, best_of: str | None = None) -> Opened:
    """The model in a work directory or in a Hugging Face folder, which we or transformers wrote.

    step, best_of: of a run, one or the other: a checkpoint, or the first of `best_steps` that loads; else the newest.
    mesh: where the parameters lie; by default that of `restore` for a run, else all of this process's devices with
    whole parameters each.   UserError where nothing can be read.
    """
    directory = RunDirectory(source)
    if _is_hugging_face(directory):
        if step is not None or best_of is not None:
            given = f"--best {best_of}" if step is None else f"--step {step}"
            raise UserError(f"{given}: {source} is a Hugging Face folder, of one step; leave it out")
        doing(f"reading {source}")
        with local_folder(directory.path) as folder:
            return _read(directory.path, folder, mesh or row_mesh(jax.local_devices(), []))
    if not is_file(directory.recipe):
        raise UserError(
            f"{source} is no run: it has no recipe.json, and no Hugging Face folder: it has no config.json; make a run "
            "with `python -m pretrain run`"
        )
    if best_of is not None and step is not None:
        raise UserError(f"--best {best_of}: says which step to read, and so does --step {step}; leave one of them out")
    restored = restore(directory, step, mesh, best_of)
    with local_folder(directory.tokenizer) as folder:
        tokenizer = stored.load(folder)
    return Opened(
        source, restored.assembly.model, restored.whole, restored.mesh, tokenizer, directory.tokenizer, restored
    )


def best_steps(directory: RunDirectory, name: str) -> list[int]:
    """The steps of the checkpoints that there are, that with the lowest held-out loss of a task first, or of the run,
    by the name `loss`. UserError where none was evaluated."""
    recipe, steps = directory.read_recipe(), directory.checkpoint_steps()
    evaluations = {figures["step"]: losses(recipe, figures) for figures in read_metrics(directory, "eval")}
    ever, there = (best(recipe, evaluations, of) for of in (evaluations, steps))
    if name not in ever:
        raise UserError(unknown(f"--best: {directory.path} has no evaluation of", name, ever or [LOSS]))
    if name not in there:
        raise UserError(
            f"--best {name}: no checkpoint of {directory.path} was evaluated; there are {steps}: give --step"
        )
    if ever[name] != there[name]:
        log.warning(
            "--best %s: the lowest loss was at step %d, whose checkpoint was not kept (see --keep-best); of those that "
            "were, step %d is read",
            *(name, ever[name], there[name]),
        )
    ranked = []
    while left := best(recipe, evaluations, {*steps} - {*ranked}).get(name):
        ranked.append(left)
    return ranked


def identity_of(source: Path) -> str:
    """Sources that have the same are the same model, however long it was trained."""
    directory = RunDirectory(source)
    if not _is_hugging_face(directory):
        return directory.identity()
    return hashlib.sha256(str(source).encode()).hexdigest()[:16]


def _is_hugging_face(directory: RunDirectory) -> bool:
    found = is_listing(directory.path) or is_file(directory.path / "config.json")
    return found and not is_file(directory.recipe)


def _read(source: Path, folder: Path, mesh: Mesh) -> Opened:
    """A Hugging Face folder.   folder: its copy on this machine."""
    config = config_from(folder)
    family, heads = family_of(config), heads_in_folder(folder, config)
    module = family.module(config, programs.default(), heads)
    spec = {name: Feature((1,) * len(one.shape), one.dtype) for name, one in family.inputs.items() if one.required}
    shapes = jax.eval_shape(lambda: initialise(jax.random.key(0), module, spec))
    first = next(iter(folders(folder, family).values()))
    params, tokenizer = load(folder, config, shapes, first), stored.load(first)
    placed = jax.device_put(params, parameter_shardings(family.parameters(config, heads), shapes, mesh))
    return Opened(source, module, placed, mesh, tokenizer, first if folder == source else source)
