"""Train a recipe, as a chain of values: its corpora are opened, it is prepared, placed, started and trained."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Mapping

import jax

from data_pipelines.corpus import Corpus, open_corpora, sound, written
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from data_pipelines.tokenizers import stored as tokenizers
from models.core.parameters import count
from pretrain.huggingface.config import misfits
from pretrain.options import Options
from pretrain.recipe import (
    Recipe,
    boundaries,
    from_json,
    phase_at,
    rate_after,
    resolve,
    same_programs,
    schedule_in,
    to_json,
)
from pretrain.storage import run_directory
from pretrain.storage.journal import Warnings
from pretrain.storage.run_directory import flat
from pretrain.training.assembly import parameter_shapes, split_frozen
from pretrain.training.attention_choice import form_of_pattern, why_plain
from pretrain.training.data import check_data, said_of_data
from pretrain.training.loop import train
from pretrain.training.placement import EVALUATE, TRAIN, Placed, place, trace
from pretrain.training.signals import StopRequest
from pretrain.training.start import First, Run, begun_from, start
from tpu.cluster import agree, from_first
from tpu.mesh import device_memory, mesh_shape, reason

OF_A_HOST = ("corpus", "workdir", "coordinator", "processes", "process", "workers", "profile")


def run(recipe: Recipe, options: Options, stop: StopRequest | None = None) -> int:
    """Train a recipe in a work directory, from its newest checkpoint if it has one -> exit status.

    0: all steps are done.   75 (`signals.EXIT_STOPPED`): stopped by a signal, with a checkpoint.
    UserError before anything is compiled for whatever the user can put right, before the first step for what does not
    compile or fit.
    """
    with Warnings() as warnings:
        run_directory.check_writable(options.workdir)
        corpora = opened(options)
        for corpus in corpora.values():
            _check_splits(corpus)
        return run_on(corpora, recipe, options, warnings, stop)[0]


def run_on(
    corpora: Mapping[str, Corpus],
    recipe: Recipe,
    options: Options,
    warnings: Warnings,
    stop: StopRequest | None = None,
    evaluators: Callable | None = None,
    before: Placed | None = None,
) -> tuple[int, Placed]:
    """The same of what is opened -> (exit status, what the run was placed as).

    evaluators: what evaluates the tasks of a phase in place of `Evaluators`, made as they are.
    before: what another run in this process was placed as, whose programs are taken where they are the same.
    """
    checked = _checked(recipe, corpora, options)
    _check_memory(checked)
    if before is not None and same_programs(before.assembly.recipe) == same_programs(checked):
        placed = before.of(checked)
    else:
        placed = place(checked, options, jax.devices(), device_memory())
    begun = begun_from(placed, next(iter(corpora.values())), options)
    doing("tracing the programs")
    trace(placed.stages, (TRAIN, EVALUATE) if evaluators is None else (TRAIN,))
    with start(placed, corpora, options, begun, warnings, stop or StopRequest(), evaluators) as (whole, first):
        for line in _said(placed, whole, first):
            whole.journal.say(line)
        with sound(corpora.values()):
            state, status = train(whole, first.state, first.phase)
        if status == 0:
            whole.journal.say(f"done: {int(state.step)} steps in {whole.directory.path}")
        return status, placed


def opened(options: Options) -> dict[str, Corpus]:
    """The corpora by name, of which each host may have copies of its own, as they were when the run began."""
    states, found = from_first("--workdir", lambda: run_directory.states(options.workdir)), {}

    def fingerprints() -> str:
        found.update(open_corpora(options.corpus, states))
        return written({name: corpus.fingerprint for name, corpus in found.items()})

    agree("the fingerprint of --corpus", fingerprints)
    return {name: found[name] for name in states} if states.keys() == found.keys() else found


def _check_splits(corpus: Corpus) -> None:
    for split, cure in (("train", "with more text"), ("heldout", "with --heldout above 0, of several documents")):
        if not corpus.size(split)["documents"]:
            raise UserError(f"--corpus {corpus.path}: its {split} split has no documents; prepare it {cure}")


def _checked(recipe: Recipe, corpora: Mapping[str, Corpus], options: Options) -> Recipe:
    """The recipe that all processes train, with the corpora's vocabulary, which they have in common."""
    resolved = resolve(recipe, next(iter(corpora.values())))
    check_data(resolved, corpora)
    of_run = {name: value for name, value in dataclasses.asdict(options).items() if name not in OF_A_HOST}
    agree("the recipe and its options", lambda: flat(json.loads(to_json(resolved))) | of_run)
    if options.extend is None:
        return resolved
    return from_json(from_first("--extend", lambda: to_json(run_directory.longer(options, resolved))))


def _check_memory(recipe: Recipe) -> None:
    """UserError where all devices together have no room for parameters, and gradients of those trained, in float32."""
    shapes = parameter_shapes(recipe)
    parameters, trained = count(shapes), count(split_frozen(shapes, recipe)[0])
    of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    available = jax.device_count() * (device_memory() or of_host) / 2**30
    needed = 4 * (parameters + trained) / 2**30
    if needed > available:
        raise UserError(
            f"model: {parameters:,} parameters with their gradients take {needed:,.0f} GiB, and all devices have "
            f"{available:,.0f}: lower its sizes, or take more devices"
        )


def _said(placed: Placed, run: Run, first: First) -> list[str]:
    """What the log says before the first step."""
    assembly, mesh, recipe, corpora, options = placed.assembly, run.mesh, run.recipe, run.corpora, run.options
    program = assembly.model.program
    said = [
        f"{recipe.name}: {count(first.state.params) / 1e6:.1f}M parameters, {recipe.steps} steps, "
        f"on {mesh.size} x {mesh.devices.flat[0].device_kind} as {mesh_shape(mesh)}, "
        f"{program.dtype}, layers {program.depth}, remat {program.remat}, attention {program.attention}"
    ]
    if options.mesh is None and mesh.size > 1:
        said.append(reason(mesh_shape(mesh), placed.load))
    said += why_plain(assembly, options, mesh) + form_of_pattern(assembly)
    if untrained := sorted(set.intersection(*(set(stage.untrained()) for stage in placed.stages))):
        said.append(f"nothing trains these, they stay as they begin: {', '.join(untrained)}")
    said += said_of_data(recipe, corpora, mesh)
    corpus = next(iter(corpora.values()))
    made = tokenizers.load(corpus.tokenizer_path)
    said += [f"--corpus {corpus.source}: {misfit}" for misfit in misfits(recipe.model, made)]
    for index, (begin, end) in enumerate(itertools.pairwise([0, *boundaries(recipe)])):
        if begin == end:
            said.append(
                f"phase {index + 1} has no step: phases.{index}.share={recipe.phases[index].share} of {recipe.steps}"
            )
    said += [first.origin, *filter(None, [first.renewed])]
    if first.before and first.before.steps != recipe.steps:
        said.append(longer_or_shorter(first.before, recipe, int(first.state.step), options.extend))
    for corpus in corpora.values():
        if corpus.fingerprint != corpus.manifest["fingerprint"]:
            parts = f"the {len(corpus.parts)} parts that it began with"
            said.append(f"--corpus {corpus.source}: has grown; the run goes on with {parts}")
    return said


def longer_or_shorter(before: Recipe, recipe: Recipe, step: int, extend: str | None = None) -> str:
    """What another number of steps changes."""
    said, (was, now) = f"steps: {before.steps} -> {recipe.steps}", (phase_at(of, step) + 1 for of in (before, recipe))
    if was != now and not extend:
        said += f"; step {step} was of phase {was} and is of phase {now}, which are shares of all steps (see --extend)"
    old, new = rate_after(before, step), rate_after(recipe, step)
    if extend:
        return f"{said}; from here {extend}: rate {old:.3g} -> {new:.3g}"
    if old == new:
        return said
    name, _ = schedule_in(recipe, phase_at(recipe, step))
    return f"{said}; the {name} schedule is evaluated for the new total: rate {old:.3g} -> {new:.3g}"
