"""Start or resume a run: check everything that can be checked, build or restore the state, train."""

import dataclasses
import json
import os
from contextlib import closing

import jax
from jax.sharding import Mesh

from data_pipelines.checks import sound
from data_pipelines.cloud import is_file
from data_pipelines.corpora import open_corpora, written
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.progress import busy, doing
from data_pipelines.tokenizers import stored as tokenizers
from models.core.parameters import Params, count
from pretrain.huggingface.tokenizer_fit import misfits
from pretrain.objectives.teacher import TEACHERS
from pretrain.options import Options
from pretrain.recipe import Recipe, check_rowwise, from_json, resolve, to_json
from pretrain.schedules import learning_rate
from pretrain.state import TrainState
from pretrain.storage import run_directory
from pretrain.storage.checkpoints import Checkpoints
from pretrain.storage.environment import changed, versions
from pretrain.storage.journal import Journal, Silence, Warnings
from pretrain.storage.run_directory import RunDirectory, disk_errors, flat
from pretrain.training.ahead import trace
from pretrain.training.assembly import (
    Assembly,
    assemble,
    initial_params,
    initial_state,
    parameter_shapes,
)
from pretrain.training.attention_choice import chosen_program, form_of_pattern, why_plain
from pretrain.training.data import check_data, said_of_data
from pretrain.training.initial_weights import INIT_FROM, load_weights
from pretrain.training.loop import Run, describe, train
from pretrain.training.placement import Stage, load_of, place_parameters, shardings
from pretrain.training.restore import load_frozen, phase_after, save_frozen
from pretrain.training.signals import StopRequest
from tpu.cluster import agree, from_first, gather, is_first
from tpu.mesh import MeshShape, choose_mesh, device_memory, mesh_shape, reason


def run(recipe: Recipe, options: Options, stop: StopRequest | None = None) -> int:
    """Train a recipe in a work directory, from its newest checkpoint if it has one -> exit status.

    0: all steps are done.   75 (`signals.EXIT_STOPPED`): stopped by a signal, with a checkpoint.
    UserError before anything is compiled for whatever the user can put right, before the first step for what does not
    compile or fit.
    """
    with Warnings() as warnings:
        return _run(recipe, options, stop or StopRequest(), warnings)


def _run(recipe: Recipe, options: Options, stop: StopRequest, warnings: Warnings) -> int:
    run_directory.check_writable(options.workdir)
    corpora = _corpora(options)
    corpus = next(iter(corpora.values()))  # they have one vocabulary
    for one in corpora.values():
        _check_splits(one)
    given = resolve(recipe, corpus)
    check_data(given, corpora)
    agree("the recipe and its options", lambda: _shared_settings(given, options))
    extended = from_first("--schedule.from-here", lambda: to_json(run_directory.extended(options.workdir, given)))
    recipe = from_json(extended)
    shapes = parameter_shapes(assemble(recipe))
    _check_memory(count(shapes))
    mesh, why = chosen_mesh(recipe, shapes, options)
    assembly = assemble(recipe, chosen_program(recipe, options, mesh))
    check_batches(recipe, options.microbatches, mesh_shape(mesh))
    weights = _initial_weights(assembly, shapes, corpus, options)
    teachers = _teachers(recipe, shapes, corpus, options)
    doing("tracing the programs")
    stages = trace(assembly, mesh, options.microbatches, shapes)
    renewed = _renewed(RunDirectory(options.workdir))
    with disk_errors(RunDirectory(options.workdir)), run_directory.alone(options.workdir):
        directory, before = run_directory.start(
            options.workdir, recipe, corpora, options.init_from, options.init_heads_anew
        )
        with closing(Checkpoints(directory.checkpoints, options.keep, options.keep_every)) as checkpoints:
            first = _first_state(stages, before or recipe, directory, checkpoints, weights, teachers)
            state, carried, frozen, origin = first
            with closing(journal_of(directory, int(state.step), recipe)) as journal, warnings.going_to(journal):
                journal.say(describe(assembly, state.params, mesh))
                if why:
                    journal.say(why)
                for line in why_plain(assembly, options, mesh) + form_of_pattern(assembly):
                    journal.say(line)
                if untrained := sorted(set.intersection(*(set(stage.untrained()) for stage in stages))):
                    journal.say(f"nothing trains these, they stay as they begin: {', '.join(untrained)}")
                for line in said_of_data(recipe, corpora, mesh):
                    journal.say(line)
                for misfit in misfits(recipe.model, tokenizers.load(corpus.tokenizer_path)):
                    journal.say(f"--corpus {corpus.source}: {misfit}")
                journal.say(origin)
                if renewed:
                    journal.say(renewed)
                if before and before.steps != recipe.steps:
                    journal.say(_longer_or_shorter(before, recipe, int(state.step)))
                for said in filter(None, map(_grown, corpora.values())):
                    journal.say(said)
                whole = Run(assembly, corpora, options, directory, checkpoints, journal, mesh, frozen, stop, stages)
                with sound(corpora.values()):
                    state, status = train(whole, state, carried)
                if status == 0:
                    journal.say(f"done: {int(state.step)} steps in {directory.path}")
    return status


def _corpora(options: Options) -> dict[str, Corpus]:
    """The corpora by name, of which each host may have copies of its own, as they were when the run began."""
    states, opened = from_first("--workdir", lambda: run_directory.states(options.workdir)), {}

    def fingerprints() -> str:
        opened.update(open_corpora(options.corpus, states))
        return written({name: corpus.fingerprint for name, corpus in opened.items()})

    agree("the fingerprint of --corpus", fingerprints)
    return {name: opened[name] for name in states} if states.keys() == opened.keys() else opened


def _grown(corpus: Corpus) -> str | None:
    """What has been added to a corpus since the run began, which goes on without it."""
    if corpus.fingerprint == corpus.manifest["fingerprint"]:
        return None
    parts = len(corpus.parts)
    return f"--corpus {corpus.source}: has grown; the run goes on with the {parts} parts that it began with"


OF_A_HOST = ("corpus", "workdir", "coordinator", "processes", "process", "workers", "profile")


def _shared_settings(recipe: Recipe, options: Options) -> dict:
    """What all processes must have been given alike, as flat JSON."""
    of_run = {name: value for name, value in dataclasses.asdict(options).items() if name not in OF_A_HOST}
    return flat(json.loads(to_json(recipe))) | of_run


def journal_of(directory: RunDirectory, step: int, recipe: Recipe) -> Journal | Silence:
    """The first process writes for all."""
    return Journal(directory, step, recipe.steps) if is_first() else Silence()


def chosen_mesh(recipe: Recipe, shapes: Params, options: Options) -> tuple[Mesh, str | None]:
    """(the mesh that the options name, or the one that suits the model on this machine's devices; why that one)."""
    devices = jax.devices()
    load = load_of(recipe, shapes, devices, device_memory())
    mesh = choose_mesh(options.mesh, devices, load)
    return mesh, reason(mesh_shape(mesh), load) if options.mesh is None and mesh.size > 1 else None


def _initial_weights(assembly: Assembly, shapes: Params, corpus: Corpus, options: Options) -> Params | None:
    """What --init-from names, unless the work directory has checkpoints to go on from."""
    source, heads_anew = from_first("--init-from", lambda: _init_from(RunDirectory(options.workdir), options))
    if source is None:
        return None
    weights, own = [], {name: of for name, of in shapes.items() if name != TEACHERS}
    start = (lambda: jax.device_get(jax.jit(lambda: initial_params(assembly))())) if heads_anew else None

    def load():
        weights.append(load_weights(INIT_FROM, source, assembly.recipe.model, own, corpus, start))

    gather(f"--init-from {source}", load)
    return weights[0]


def _teachers(recipe: Recipe, shapes: Params, corpus: Corpus, options: Options) -> Params:
    """The parameters of the recipe's teachers from their sources, unless the work directory has checkpoints."""
    begun = from_first("teachers", lambda: bool(RunDirectory(options.workdir).checkpoint_steps()))
    if begun or not recipe.teachers:
        return {}
    found = {}

    def load() -> None:
        for index, teacher in enumerate(recipe.teachers):
            setting, own = f"teachers.{index}.source", shapes[TEACHERS][teacher.name]
            found[teacher.name] = load_weights(setting, teacher.source, teacher.model, own, corpus)

    gather("teachers", load)
    return {TEACHERS: found}


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


def _check_splits(corpus: Corpus) -> None:
    for split, cure in (("train", "with more text"), ("heldout", "with --heldout above 0, of several documents")):
        if not corpus.size(split)["documents"]:
            raise UserError(f"--corpus {corpus.path}: its {split} split has no documents; prepare it {cure}")


def check_batches(recipe: Recipe, microbatches: int, shape: MeshShape) -> None:
    """UserError unless a mesh of this shape cuts the microbatches of every phase evenly."""
    check_rowwise(recipe, microbatches)
    parts = microbatches * shape.batch_parts
    for index, phase in enumerate(recipe.phases):
        if phase.batch_size % parts:
            raise UserError(
                f"phases.{index}.batch_size={phase.batch_size} is not a multiple of --microbatches {microbatches} x "
                f"the {shape.batch_parts} parts of the mesh {shape}: choose a multiple of {parts}"
            )


def _check_memory(parameters: int) -> None:
    """UserError where all devices together have no room for parameters and their gradients in float32."""
    of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    available, needed = jax.device_count() * (device_memory() or of_host) / 2**30, 8 * parameters / 2**30
    if needed > available:
        raise UserError(
            f"model: {parameters:,} parameters with their gradients take {needed:,.0f} GiB, and all devices have "
            f"{available:,.0f}: lower its sizes, or take more devices"
        )


def _longer_or_shorter(before: Recipe, recipe: Recipe, step: int) -> str:
    """What another number of steps changes."""
    said = f"steps: {before.steps} -> {recipe.steps}"
    if not recipe.schedule.depends_on_total:
        return said
    old, new = (float(learning_rate(one.schedule, step, one.steps)) for one in (before, recipe))
    if recipe.schedule.from_here:
        return f"{said}; from here {recipe.schedule.from_here}: rate {old:.3g} -> {new:.3g}"
    return f"{said}; the {recipe.schedule.name} schedule is evaluated for the new total: rate {old:.3g} -> {new:.3g}"


@busy("making or restoring the state")
def _first_state(
    stages: list[Stage],
    before: Recipe,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    weights: Params | None,
    teachers: Params,
) -> tuple[TrainState, int, Params, str]:
    """(state, the phase of its carry, frozen parameters, where they come from).

    before: the recipe, with the steps that it had so far: another number moves the phases.
    """

    def phase_of(step: int) -> int:
        recorded = checkpoints.phase(step)
        return phase_after(before, step) if recorded is None else recorded

    assembly, first_stage = stages[0].assembly, stages[0]
    state = checkpoints.restore(lambda step: stages[phase_of(step)].state)
    if state is not None:
        step = int(state.step)
        return state, phase_of(step), load_frozen(first_stage, directory), f"resuming from step {step}"
    made = lambda weights: initial_params(assembly) if weights is None else weights
    first = jax.jit(
        lambda weights, teachers: initial_state(assembly, made(weights) | teachers, 0),
        out_shardings=shardings((first_stage.state, first_stage.frozen)),
    )
    given = None if weights is None else place_parameters(weights, first_stage)
    state, frozen = first(given, place_parameters(teachers, first_stage))
    save_frozen(directory, frozen)
    return state, 0, frozen, "starting from random weights" if weights is None else "starting from --init-from"
