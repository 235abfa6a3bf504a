"""Train a recipe: open its corpora, check it, place it on a mesh, start or resume the run, and train."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Mapping

import jax

from data_pipelines.corpus import Corpus, open_corpora, sound, written
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from data_pipelines.soft_targets import SoftTargets
from data_pipelines.tokenizers import stored as tokenizers
from models.core.parameters import count
from pretrain.huggingface.config import misfits
from pretrain.options import Options
from pretrain.recipe import Recipe, boundaries, from_json, phase_at, rate_after, resolve, same_programs, to_json
from pretrain.storage import run_directory
from pretrain.storage.journal import Warnings
from pretrain.storage.run_directory import flat
from pretrain.training.assembly import parameter_shapes, split_frozen
from pretrain.training.attention_choice import form_of_pattern, why_plain
from pretrain.training.data import check_data, data_lines
from pretrain.training.loop import train
from pretrain.training.placement import EVALUATE, TRAIN, Placed, place, trace
from pretrain.training.signals import StopRequest
from pretrain.training.start import First, Run, initial_weights, start
from tpu.cluster import agree, from_first
from tpu.mesh import device_memory, mesh_shape, reason

OF_A_HOST = ("corpus", "workdir", "soft_targets", "coordinator", "processes", "process", "workers", "profile")


def run(recipe: Recipe, options: Options, stop: StopRequest | None = None) -> int:
    """Train a recipe in a work directory, from its newest checkpoint if it has one -> exit status. 0: all steps are
    done.   75 (`signals.EXIT_STOPPED`): stopped by a signal, with a checkpoint.   UserError for mistakes before
    anything is compiled, and before the first step if a program does not compile or fit into memory."""
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
    """Train a recipe on opened corpora -> (exit status, the placed recipe).   evaluators: in place of `Evaluators`.
    before: of an earlier run in this process, whose programs are reused if they are the same."""
    checked = _checked(recipe, corpora, options)
    _check_memory(checked)
    if before is not None and same_programs(before.assembly.recipe) == same_programs(checked):
        placed = before.of(checked)
    else:
        placed = place(checked, options, jax.devices(), device_memory())
    initial = initial_weights(placed, next(iter(corpora.values())), options)
    doing("tracing the programs")
    trace(placed.stages, (TRAIN, EVALUATE) if evaluators is None else (TRAIN,))
    with start(placed, corpora, options, initial, warnings, stop or StopRequest(), evaluators) as (whole, first):
        for line in _opening_lines(placed, whole, first):
            whole.journal.say(line)
        with sound(corpora.values()):
            state, status = train(whole, first.state, first.phase)
        if status == 0:
            whole.journal.say(f"done: {int(state.step)} steps in {whole.directory.path}")
        return status, placed


def opened(options: Options) -> dict[str, Corpus]:
    """Open the corpora by name, in the state in which the run began; each host may have its own copies."""
    states, corpora = from_first("--workdir", lambda: run_directory.states(options.workdir)), {}

    def fingerprints() -> str:
        corpora.update(open_corpora(options.corpus, states))
        return written({name: corpus.fingerprint for name, corpus in corpora.items()})

    agree("the fingerprint of --corpus", fingerprints)
    if options.soft_targets is not None:
        if len(corpora) > 1:
            raise UserError(f"--soft-targets {options.soft_targets}: is of one corpus; give only that with --corpus")
        next(iter(corpora.values())).soft_targets = SoftTargets(options.soft_targets)
    return {name: corpora[name] for name in states} if states.keys() == corpora.keys() else corpora


def _check_splits(corpus: Corpus) -> None:
    for split, cure in (("train", "with more text"), ("heldout", "with --heldout above 0, of several documents")):
        if not corpus.size(split)["documents"]:
            raise UserError(f"--corpus {corpus.path}: its {split} split has no documents; prepare it {cure}")


def _checked(recipe: Recipe, corpora: Mapping[str, Corpus], options: Options) -> Recipe:
    """Return the recipe with the corpora's vocabulary size, checked, and the same in all processes."""
    resolved = resolve(recipe, next(iter(corpora.values())))
    check_data(resolved, corpora)
    shared = {name: value for name, value in dataclasses.asdict(options).items() if name not in OF_A_HOST}
    agree("the recipe and its options", lambda: flat(json.loads(to_json(resolved))) | shared)
    if options.extend is None:
        return resolved
    return from_json(from_first("--extend", lambda: to_json(run_directory.longer(options, resolved))))


def _check_memory(recipe: Recipe) -> None:
    """Raise UserError if the devices together cannot hold the parameters and their gradients in float32."""
    shapes = parameter_shapes(recipe)
    parameters, trained = count(shapes), count(split_frozen(shapes, recipe)[0])
    of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    available = jax.device_count() * (device_memory() or of_host) / 2**30
    needed = 4 * (parameters + trained) / 2**30
    if needed > available:
        raise UserError(
            f"model: {parameters:,} parameters and their gradients take {needed:,.0f} GiB, but the devices have only "
            f"{available:,.0f}; make it smaller, or use more devices"
        )


def _opening_lines(placed: Placed, run: Run, first: First) -> list[str]:
    """List what the log says before the first step."""
    assembly, mesh, recipe, corpora, options = placed.assembly, run.mesh, run.recipe, run.corpora, run.options
    program = assembly.model.program
    lines = [
        f"{recipe.name}: {count(first.state.params) / 1e6:.1f}M parameters, {recipe.steps} steps, "
        f"on {mesh.size} x {mesh.devices.flat[0].device_kind} as {mesh_shape(mesh)}, "
        f"{program.dtype}, layers {program.depth}, remat {program.remat}, attention {program.attention}"
    ]
    if options.mesh is None and mesh.size > 1:
        lines.append(reason(mesh_shape(mesh), placed.load))
    lines += why_plain(assembly, options, mesh) + form_of_pattern(assembly)
    never = set.intersection(*(set(stage.untrained()) for stage in placed.stages))
    if untrained := sorted(path for path in never if not path.endswith("padding_positions")):  # which no row reads
        lines.append(f"no loss depends on these parameters, which keep their initial values: {', '.join(untrained)}")
    lines += data_lines(recipe, corpora, mesh)
    corpus = next(iter(corpora.values()))
    tokenizer = tokenizers.load(corpus.tokenizer_path)
    lines += [f"--corpus {corpus.source}: {misfit}" for misfit in misfits(recipe.model, tokenizer)]
    for index, (begin, end) in enumerate(itertools.pairwise([0, *boundaries(recipe)])):
        if begin == end:
            lines.append(
                f"phase {index + 1} has no steps: phases.{index}.share={recipe.phases[index].share} of {recipe.steps}"
            )
    lines += [first.origin, *filter(None, [first.renewed])]
    if first.before and first.before.steps != recipe.steps:
        lines.append(longer_or_shorter(first.before, recipe, int(first.state.step), options.extend))
    for corpus in corpora.values():
        if corpus.fingerprint != corpus.manifest["fingerprint"]:
            parts = f"the {len(corpus.parts)} parts that it started with"
            lines.append(f"--corpus {corpus.source}: has grown; the run continues with {parts}")
    return lines


def longer_or_shorter(before: Recipe, recipe: Recipe, step: int, extend: str | None = None) -> str:
    """Describe what a changed number of steps changes."""
    change = f"steps: {before.steps} -> {recipe.steps}"
    was, now = (phase_at(planned, step) + 1 for planned in (before, recipe))
    if was != now and not extend:
        change += f"; step {step} moves from phase {was} to phase {now}, as phases are shares of steps (see --extend)"
    old, new = rate_after(before, step), rate_after(recipe, step)
    if extend:
        return f"{change}; --extend {extend}: learning rate {old:.3g} -> {new:.3g}"
    if old == new:
        return change
    return f"{change}; the schedule is stretched to the new total: learning rate {old:.3g} -> {new:.3g}"
