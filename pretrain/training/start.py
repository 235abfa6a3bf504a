"""Start or resume a run: open its work directory, checkpoints and journal, and make or restore the train state.

Initial weights (--init-from, teachers) are read from a Hugging Face folder or another run's work directory.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
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
from pretrain.objectives.distillation import PROJECTIONS
from pretrain.objectives.objective import TEACHERS
from pretrain.options import Options
from pretrain.recipe import Recipe, asked
from pretrain.storage import run_directory
from pretrain.storage.best import LOSS, best, losses
from pretrain.storage.checkpoints import Checkpoints, TrainState, load_frozen, phase_of, save_frozen
from pretrain.storage.journal import Journal, Warnings, open_journal, read_metrics
from pretrain.storage.run_directory import RunDirectory, changed, disk_errors, versions
from pretrain.training.assembly import frozen_in, initial_params, parameter_shapes, table_of
from pretrain.training.opened import restore
from pretrain.training.placement import Placed, Stage, any_task, place_parameters, shardings
from pretrain.training.signals import StopRequest
from pretrain.training.step import initial_state
from pretrain.training.teaching import taken
from tpu.cluster import from_first, gather, is_first
from tpu.mesh import host_mesh

INIT_FROM = "--init-from"


class InitialWeights(NamedTuple):
    """Initial weights of a run, in this host's memory.   weights: None: random.   teachers: by name; {} on resume."""

    weights: Params | None
    teachers: Params


class Run(NamedTuple):
    """Everything of a run but its state.   evaluations: step -> `losses` so far.   evaluators: see `run_on`."""

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
    """The state to train from.   phase: of the state.   before: former recipe of the work directory, if any.   origin,
    renewed: log lines on where the state comes from, and on versions that differ from the last start."""

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
    initial: InitialWeights,
    warnings: Warnings,
    stop: StopRequest,
    evaluators: Callable | None = None,
) -> Iterator[tuple[Run, First]]:
    """Open the work directory, for this run alone on this machine, and yield the run and its first state."""
    directory, recipe = RunDirectory(options.workdir), placed.assembly.recipe
    renewed = changed(directory.read_run()["versions"], versions()) if is_file(directory.run) else None
    with disk_errors(directory), run_directory.alone(options.workdir):
        directory, before = run_directory.start(recipe, corpora, options)
        evaluations: dict[int, dict[str, float]] = {}
        bests = lambda steps: best(recipe, evaluations, steps).values() if options.keep_best else ()
        with closing(Checkpoints(directory.checkpoints, options.keep, options.keep_every, bests)) as checkpoints:
            state, phase, frozen, origin = _first_state(placed, before or recipe, directory, checkpoints, initial)
            arguments = (directory, int(state.step), recipe.steps, options.track)
            journal = open_journal(*arguments) if is_first() else Journal()  # the first process writes for all
            with closing(journal), warnings.going_to(journal):
                measured = lambda: [(one["step"], losses(recipe, one)) for one in read_metrics(directory, "eval")]
                evaluations.update(from_first("evaluations", measured))
                fixed = (recipe, corpora, options, directory, checkpoints, journal, placed.mesh, frozen, placed.stages)
                yield Run(*fixed, evaluations, stop, evaluators), First(state, phase, before, origin, renewed)


def random_origin(recipe: Recipe) -> str:
    """Say that weights are random, and what of them is frozen."""
    frozen = frozen_in(recipe, 0)
    warning = f", also what is frozen ({', '.join(frozen)}); for trained weights give --init-from" if frozen else ""
    return f"starting from random weights{warning}"


def initial_weights(placed: Placed, corpus: Corpus, options: Options) -> InitialWeights:
    """Load the weights of --init-from and of the recipe's teachers, unless the work directory has checkpoints."""
    recipe, shapes = placed.assembly.recipe, parameter_shapes(placed.assembly.recipe)
    source, heads_anew = from_first(INIT_FROM, lambda: _init_from(RunDirectory(options.workdir), options))
    resumes = from_first("teachers", lambda: bool(RunDirectory(options.workdir).checkpoint_steps()))

    def random(paths: Collection[str] = ()) -> Params:
        """Make the parameters with these paths, by default all."""
        drawn = jax.jit(lambda: {p: x for p, x in leaves(initial_params(placed.assembly)) if not paths or p in paths})
        return nest(jax.device_get(drawn()))

    def load() -> InitialWeights:
        weights, teachers = None, {}
        if source is not None:
            beside = {name: part for name, part in shapes.items() if name in (TEACHERS, PROJECTIONS)}
            wanted = {name: part for name, part in shapes.items() if name not in beside}
            weights = load_weights(INIT_FROM, source, recipe.model, wanted, corpus, random if heads_anew else None)
            if PROJECTIONS in beside:  # drawn anew
                weights |= random([path for path, _ in leaves({PROJECTIONS: beside[PROJECTIONS]})])
        for index, teacher in enumerate(() if resumes else recipe.teachers):
            setting = "--teacher" if options.teacher else f"teachers.{index}.source"
            wanted = shapes[TEACHERS][teacher.name]
            given = setting, teacher.source, teacher.model, wanted, corpus
            teachers[teacher.name] = load_weights(*given, best=teacher.best)
        if source is not None and any(teacher.copied for teacher in recipe.teachers):
            raise UserError(f"{INIT_FROM} {source}: the student begins with its teacher's weights; leave it out")
        if weights is None and any(teacher.copied and teacher.name in teachers for teacher in recipe.teachers):
            weights = taken(recipe, teachers, random())
        return InitialWeights(weights, {TEACHERS: teachers} if teachers else {})

    loaded: list[InitialWeights] = []
    gather("initial weights", lambda: loaded.append(load()))
    return loaded[0]


def _init_from(directory: RunDirectory, options: Options) -> tuple[str | None, bool]:
    """Return (source of --init-from or None, whether missing heads start from random weights)."""
    if directory.checkpoint_steps():
        return None, False
    chosen = options.init_from, options.init_heads_anew
    if is_file(directory.recipe):  # killed before its first checkpoint
        about = directory.read_run()
        before = about["init_from"], about["init_heads_anew"]
        return before if chosen[0] in (None, before[0]) else chosen
    return chosen


@busy("initializing or restoring the train state")
def _first_state(
    placed: Placed, before: Recipe, directory: RunDirectory, checkpoints: Checkpoints, initial: InitialWeights
) -> tuple[TrainState, int, Params, str]:
    """Return (state, its phase, frozen parameters, log line on where they come from).   before: the recipe with its
    former number of steps, which determines the phases of checkpoints."""

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
    weights = None if initial.weights is None else place_parameters(initial.weights, first_stage)
    key = jax.random.key(assembly.recipe.seed)
    state, frozen = first(key, weights, place_parameters(initial.teachers, first_stage))
    save_frozen(directory.frozen, frozen)
    return (
        state,
        0,
        frozen,
        random_origin(placed.assembly.recipe) if weights is None else "starting from the weights of a trained model",
    )


def load_weights(
    setting: str, source: str, config, shapes: Params, corpus: Corpus, start: Callable | None = None, best: bool = False
) -> Params:
    """Load parameters for a config into this host's memory, a nested dict of NumPy arrays like `shapes`.

    setting: name of the source in errors.   start: makes random parameters, for heads that the source lacks; None makes
    a missing head an error.   best: take a run's best checkpoint.   UserError if it has another model or vocabulary.
    """
    directory = RunDirectory(source)
    try:
        if is_file(directory.recipe):
            return _of_run(directory, config, shapes, corpus, start, best)
        with local_folder(directory.path) as folder:
            return load(folder, config, shapes, corpus.tokenizer_path, start)
    except UserError as error:
        message = str(error)
        if setting != INIT_FROM:  # the heads of a teacher cannot start from random weights
            message = re.sub(f"(, or|;) {ANEW}$", "", message)
            whose = f"--{setting.removesuffix('source')}" if "." in setting else "its "
            message = message.replace("--model.", f"{whose}model.")
        raise UserError(f"{setting} {message}") from None


def _of_run(directory: RunDirectory, config, shapes: Params, corpus: Corpus, start, best: bool) -> Params:
    """Load the parameters from another run."""
    source, recipe = str(directory.path), directory.read_recipe()
    check_same(source, recipe.model, config)
    wanted, stored = dict(leaves(shapes)), {row.path for row in table_of(recipe.model, asked(recipe))}
    names = {path: name for path, name in counterparts(recipe.model, config).items() if path in wanted}
    lacking = [path for path in wanted if names.get(path) not in stored]
    check_heads(source, lacking, stored - set(names.values()), anew=start is not None)
    with local_folder(directory.tokenizer) as tokenizer:
        check_vocabulary(tokenizer, corpus.tokenizer_path, recipe.model, config)
    restored = restore(directory, mesh=host_mesh(), best_of=LOSS if best else None)
    trained = jax.device_get(dict(leaves(restored.whole)))
    converted = to_target(source, trained, restored.assembly.model.config, config)
    taken = {path: array for path, array in converted.items() if path in wanted}
    lacking = wanted.keys() - taken.keys()
    drawn = dict(leaves(start(lacking))) if lacking and start else {}
    return jax.device_get(nest(drawn | taken))
