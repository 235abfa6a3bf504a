"""What a run begins with: its work directory, checkpoints and journal, and the state to train from."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import NamedTuple

import jax

from data_pipelines.cloud import is_file
from data_pipelines.corpus import Corpus
from data_pipelines.progress import busy
from models.core.parameters import Params
from pretrain.objectives.objective import TEACHERS
from pretrain.options import Options
from pretrain.recipe import Recipe, phase_after
from pretrain.state import TrainState
from pretrain.storage import run_directory
from pretrain.storage.checkpoints import Checkpoints
from pretrain.storage.environment import changed, versions
from pretrain.storage.journal import Journal, Warnings, open_journal
from pretrain.storage.run_directory import RunDirectory, disk_errors
from pretrain.training.assembly import initial_params
from pretrain.training.initial_weights import INIT_FROM, load_weights
from pretrain.training.placement import any_task, place_parameters, shardings
from pretrain.training.prepare import Placed
from pretrain.training.restore import load_frozen, save_frozen
from pretrain.training.step import initial_state
from tpu.cluster import from_first, gather, is_first


class Begun(NamedTuple):
    """What a new run begins with, in this host's memory.   weights: None for random ones.   teachers: by name, {} where
    there are none or the work directory has them."""

    weights: Params | None
    teachers: Params


class Started(NamedTuple):
    """before: the recipe that the work directory had.   phase: that the state is of.   origin: where the state comes
    from, in words.   renewed: what has another version than at the last start, in words."""

    directory: RunDirectory
    checkpoints: Checkpoints
    journal: Journal
    state: TrainState
    phase: int
    frozen: Params
    before: Recipe | None
    origin: str
    renewed: str | None


@contextmanager
def start(
    placed: Placed, corpora: Mapping[str, Corpus], options: Options, begun: Begun, warnings: Warnings
) -> Iterator[Started]:
    """In the work directory, which no other run of this machine uses in the context."""
    renewed, recipe = _renewed(RunDirectory(options.workdir)), placed.assembly.recipe
    with disk_errors(RunDirectory(options.workdir)), run_directory.alone(options.workdir):
        directory, before = run_directory.start(recipe, corpora, options)
        with closing(Checkpoints(directory.checkpoints, options.keep, options.keep_every)) as checkpoints:
            state, phase, frozen, origin = _first_state(placed, before or recipe, directory, checkpoints, begun)
            with closing(journal_of(directory, state, recipe, options)) as journal, warnings.going_to(journal):
                yield Started(directory, checkpoints, journal, state, phase, frozen, before, origin, renewed)


def journal_of(directory: RunDirectory, state: TrainState, recipe: Recipe, options: Options) -> Journal:
    """The first process writes for all."""
    return open_journal(directory, int(state.step), recipe.steps, options.track) if is_first() else Journal()


def begun_from(placed: Placed, corpus: Corpus, options: Options) -> Begun:
    """What --init-from and the recipe's teachers name, unless the work directory has checkpoints to go on from."""
    recipe, shapes = placed.assembly.recipe, placed.shapes
    source, heads_anew = from_first(INIT_FROM, lambda: _init_from(RunDirectory(options.workdir), options))
    resumes = from_first("teachers", lambda: bool(RunDirectory(options.workdir).checkpoint_steps()))

    def random() -> Params:
        return jax.device_get(jax.jit(lambda: initial_params(placed.assembly))())

    def load() -> Begun:
        weights, teachers = None, {}
        if source is not None:
            wanted = {name: of for name, of in shapes.items() if name != TEACHERS}
            weights = load_weights(INIT_FROM, source, recipe.model, wanted, corpus, random if heads_anew else None)
        for index, one in enumerate(() if resumes else recipe.teachers):
            setting, wanted = f"teachers.{index}.source", shapes[TEACHERS][one.name]
            teachers[one.name] = load_weights(setting, one.source, one.model, wanted, corpus)
        return Begun(weights, {TEACHERS: teachers} if teachers else {})

    loaded: list[Begun] = []
    gather("initial weights", lambda: loaded.append(load()))
    return loaded[0]


def _init_from(directory: RunDirectory, options: Options) -> tuple[str | None, bool]:
    """(what --init-from names, or None; whether heads that it lacks start anew)."""
    if directory.checkpoint_steps():
        return None, False
    given = options.init_from, options.init_heads_anew
    if is_file(directory.recipe):  # killed before its first checkpoint
        about = directory.read_run()
        source, anew = about["init_from"], about.get("init_heads_anew", False)
        return (source, anew) if given[0] in (None, source) else given
    return given


def _renewed(directory: RunDirectory) -> str | None:
    """What has another version than when a work directory was last started in."""
    before = directory.read_run().get("versions") if is_file(directory.run) else None
    return changed(before, versions()) if before else None


@busy("making or restoring the state")
def _first_state(
    placed: Placed, before: Recipe, directory: RunDirectory, checkpoints: Checkpoints, begun: Begun
) -> tuple[TrainState, int, Params, str]:
    """(state, the phase that it is of, frozen parameters, where they come from).

    before: the recipe, with the steps that it had so far: another number moves the phases.
    """

    def phase_of(step: int) -> int:
        recorded = checkpoints.phase(step)
        return phase_after(before, step) if recorded is None else recorded

    assembly, first_stage = placed.assembly, placed.stages[0]
    state = checkpoints.restore(lambda step: any_task(placed.stages, phase_of(step)).state)
    if state is not None:
        step = int(state.step)
        return state, phase_of(step), load_frozen(first_stage, directory), f"resuming from step {step}"

    def make(key, weights: Params | None, teachers: Params):
        params = initial_params(assembly, key) if weights is None else weights
        return initial_state(assembly, params | teachers)

    first = jax.jit(make, out_shardings=shardings((first_stage.state, first_stage.frozen)))
    weights = None if begun.weights is None else place_parameters(begun.weights, first_stage)
    key = jax.random.key(assembly.recipe.seed)
    state, frozen = first(key, weights, place_parameters(begun.teachers, first_stage))
    save_frozen(directory, frozen)
    return state, 0, frozen, "starting from random weights" if weights is None else "starting from --init-from"
