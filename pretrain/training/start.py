"""What a run begins with: its work directory, checkpoints and journal, and the state to train from.

--init-from and teachers name weights to begin with: a Hugging Face folder or another run's work directory.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from data_pipelines.cloud import is_file, local_folder
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from models.core.parameters import Params, leaves, nest
from pretrain.huggingface.config import check_same
from pretrain.huggingface.load import ANEW, check_heads, check_vocabulary, counterparts, load, to_target
from pretrain.objectives.objective import TEACHERS
from pretrain.options import Options
from pretrain.recipe import Recipe, asked
from pretrain.storage import run_directory
from pretrain.storage.best import best, losses
from pretrain.storage.checkpoints import Checkpoints, TrainState, load_frozen, phase_of, save_frozen
from pretrain.storage.journal import Journal, Warnings, open_journal, read_metrics
from pretrain.storage.run_directory import RunDirectory, changed, disk_errors, versions
from pretrain.training.assembly import initial_params, parameter_shapes, table_of
from pretrain.training.opened import restore
from pretrain.training.placement import Placed, Stage, any_task, place_parameters, shardings
from pretrain.training.signals import StopRequest
from pretrain.training.step import initial_state
from tpu.cluster import from_first, gather, is_first
from tpu.mesh import host_mesh

INIT_FROM = "--init-from"


class Begun(NamedTuple):
    """What a new run begins with, in this host's memory.   weights: None for random ones.   teachers: by name, {} where
    there are none or the work directory has them."""

    weights: Params | None
    teachers: Params


class Run(NamedTuple):
    """What stays the same while a run lasts.   evaluations: step -> `losses`, of all so far.   evaluators: as of
    `run_on`."""

    recipe: Recipe
    corpora: Mapping[str, Corpus]
    options: Options
    directory: RunDirectory
    checkpoints: Checkpoints
    journal: Journal
    mesh: Mesh
    frozen: Params
    stages: list[Stage]
    evaluations: dict[int, dict[str, float]]
    stop: StopRequest
    evaluators: Callable | None


class First(NamedTuple):
    """What it begins or goes on with.   phase: that the state is of.   before: the recipe that the work directory had.
    origin: where the state comes from, in words.   renewed: what has another version than at the last start, in words.
    """

    state: TrainState
    phase: int
    before: Recipe | None
    origin: str
    renewed: str | None


@contextmanager
def start(
    placed: Placed,
    corpora: Mapping[str, Corpus],
    options: Options,
    begun: Begun,
    warnings: Warnings,
    stop: StopRequest,
    evaluators: Callable | None = None,
) -> Iterator[tuple[Run, First]]:
    """In the work directory, which no other run of this machine uses in the context."""
    directory, recipe = RunDirectory(options.workdir), placed.assembly.recipe
    versions_before = directory.read_run().get("versions") if is_file(directory.run) else None
    renewed = changed(versions_before, versions()) if versions_before else None
    with disk_errors(directory), run_directory.alone(options.workdir):
        directory, before = run_directory.start(recipe, corpora, options)
        evaluations: dict[int, dict[str, float]] = {}
        bests = lambda steps: best(recipe, evaluations, steps).values() if options.keep_best else ()
        with closing(Checkpoints(directory.checkpoints, options.keep, options.keep_every, bests)) as checkpoints:
            state, phase, frozen, origin = _first_state(placed, before or recipe, directory, checkpoints, begun)
            written = (directory, int(state.step), recipe.steps, options.track)
            journal = open_journal(*written) if is_first() else Journal()  # the first process writes for all
            with closing(journal), warnings.going_to(journal):
                evaluations.update(from_first("evaluations", lambda: _measured(recipe, directory)))
                of = (recipe, corpora, options, directory, checkpoints, journal, placed.mesh, frozen, placed.stages)
                yield Run(*of, evaluations, stop, evaluators), First(state, phase, before, origin, renewed)


def _measured(recipe: Recipe, directory: RunDirectory) -> list[tuple[int, dict[str, float]]]:
    return [(figures["step"], losses(recipe, figures)) for figures in read_metrics(directory, "eval")]


def begun_from(placed: Placed, corpus: Corpus, options: Options) -> Begun:
    """What --init-from and the recipe's teachers name, unless the work directory has checkpoints to go on from."""
    recipe, shapes = placed.assembly.recipe, parameter_shapes(placed.assembly.recipe)
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


@busy("making or restoring the state")
def _first_state(
    placed: Placed, before: Recipe, directory: RunDirectory, checkpoints: Checkpoints, begun: Begun
) -> tuple[TrainState, int, Params, str]:
    """(state, the phase that it is of, frozen parameters, where they come from).

    before: the recipe, with the steps that it had so far: another number moves the phases.
    """

    def phase(step: int) -> int:
        folder = directory.checkpoints / str(step)
        return from_first(f"the phase of checkpoint {step}", lambda: phase_of(folder, before))

    assembly, first_stage = placed.assembly, placed.stages[0]
    state = checkpoints.restore(lambda step: any_task(placed.stages, phase(step)).state)
    if state is not None:
        step, frozen = int(state.step), load_frozen(directory.frozen, first_stage.frozen)
        return state, phase(step), frozen, f"resuming from step {step}"

    def make(key, weights: Params | None, teachers: Params):
        params = initial_params(assembly, key) if weights is None else weights
        return initial_state(assembly, params | teachers)

    first = jax.jit(make, out_shardings=shardings((first_stage.state, first_stage.frozen)))
    weights = None if begun.weights is None else place_parameters(begun.weights, first_stage)
    key = jax.random.key(assembly.recipe.seed)
    state, frozen = first(key, weights, place_parameters(begun.teachers, first_stage))
    save_frozen(directory.frozen, frozen)
    return (
        state,
        0,
        frozen,
        "starting from random weights" if weights is None else "starting from the weights of a trained model",
    )


def load_weights(
    setting: str, source: str, config, shapes: Params, corpus: Corpus, start: Callable[[], Params] | None = None
) -> Params:
    """Parameters for a config in this host's memory, a nested dict of NumPy arrays like `shapes`.

    setting: that names the source, with which an error begins.
    start: gives random parameters for heads that the source lacks; without it, that is an error.
    UserError when the source has another model or vocabulary.
    """
    directory = RunDirectory(source)
    try:
        if is_file(directory.recipe):
            return _of_run(directory, config, shapes, corpus, start)
        with local_folder(directory.path) as folder:
            return load(folder, config, shapes, corpus.tokenizer_path, start)
    except UserError as error:
        said = str(error)
        if setting != INIT_FROM:  # a teacher's model has no heads of its own to train
            said = re.sub(f"(, or|;) {ANEW}$", "", said).replace(
                "--model.", f"--{setting.removesuffix('source')}model."
            )
        raise UserError(f"{setting} {said}") from None


def _of_run(directory: RunDirectory, config, shapes: Params, corpus: Corpus, start) -> Params:
    source, recipe = str(directory.path), directory.read_recipe()
    check_same(source, recipe.model, config)
    wanted, there = dict(leaves(shapes)), {row.path for row in table_of(recipe.model, asked(recipe))}
    begun = {path: name for path, name in counterparts(recipe.model, config).items() if path in wanted}
    lacking = [path for path in wanted if begun.get(path) not in there]
    check_heads(source, lacking, there - set(begun.values()), anew=start is not None)
    with local_folder(directory.tokenizer) as tokenizer:
        check_vocabulary(tokenizer, corpus.tokenizer_path, recipe.model, config)
    restored = restore(directory, mesh=host_mesh())
    trained = jax.device_get(dict(leaves(restored.whole)))
    found = to_target(source, trained, recipe.model, config)
    params = dict(leaves(start())) if start else {}
    return jax.device_get(nest(params | {path: array for path, array in found.items() if path in wanted}))
