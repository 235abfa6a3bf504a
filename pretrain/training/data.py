"""Batches of a run: its corpora in the recipe's order, mixed by the rates of corpora and tasks."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from data_pipelines import noise
from data_pipelines.batches import Examples, RowExamples, StreamExamples, make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import prefix_field
from data_pipelines.mixture import Mixture, Tasks, make_mixture, parse_rates
from data_pipelines.soft_targets import SoftExamples
from pretrain.objectives.objective import Phase, Task
from pretrain.recipe import Recipe, boundaries, every_task, naming, phase_at, tasks_of
from pretrain.storage.run_directory import read_object, write_whole
from tpu.batches import host_rows
from tpu.cluster import from_first, gather, is_first, number, size

Sizes = Mapping[str, Sequence[int] | None]  # corpus -> number of examples in each part; None if it has one part


def training_batches(
    recipe: Recipe, corpora: Mapping[str, Corpus], phase: Phase, task: Task, sizes: Sizes | None = None
) -> Examples | Mixture:
    """Make the batches of a task.   sizes: if already counted.   UserError if they cannot be made."""
    layout, read = task.objective.rows(phase), corpora_of(task, corpora)
    seed = noise.key(recipe.seed, "task", task.name) if task.name else recipe.seed
    shape = (phase.batch_size, seed, recipe.order)
    if len(read) == 1:
        (corpus,), known = read.values(), sizes and next(iter(sizes.values()))
        if task.objective.stored:
            return SoftExamples(layout, corpus, "train", *shape, known)
        return make_examples(layout, corpus, "train", *shape, known)
    rates = list(mixture_rates(recipe, read).values())
    return make_mixture(dict.fromkeys(read, layout), read, rates, *shape, sizes)


def corpora_of(task: Task, corpora: Mapping[str, Corpus]) -> Mapping[str, Corpus]:
    """Select the corpora that a task reads, by name; UserError if --corpus lacks the task's corpus."""
    if task.corpus and task.corpus not in corpora:
        names = ", ".join(filter(None, corpora)) or "one without a name"
        raise UserError(f"--corpus: task {task.name} reads {task.corpus}=DIR, but there is only {names}; add it")
    return {task.corpus: corpora[task.corpus]} if task.corpus else corpora


def mixture_rates(recipe: Recipe, corpora: Mapping[str, Corpus]) -> dict[str, float]:
    """Return the share of rows from each corpus, by name; they add up to 1."""
    sizes = {name: corpus.size("train")["tokens"] for name, corpus in corpora.items()}
    return parse_rates(recipe.mixture, sizes)


def examples_of_tasks(recipe: Recipe, corpora: Mapping[str, Corpus], index: int) -> dict[str, int]:
    """Estimate the number of examples of each task of a phase, by name."""
    phase = recipe.phases[index]
    return {
        task.name: sum(task.objective.rows(phase).examples_of(corpus.size("train")) for corpus in read.values())
        for task in tasks_of(recipe, phase)
        for read in [corpora_of(task, corpora)]
    }


def task_rates(recipe: Recipe, corpora: Mapping[str, Corpus], index: int) -> dict[str, float]:
    """Return the rate of each task of a phase, by name."""
    phase = recipe.phases[index]
    if not phase.rates:
        return {task.name: task.rate for task in tasks_of(recipe, phase)}
    return parse_rates(phase.rates, examples_of_tasks(recipe, corpora, index), f"phases.{index}.rates")


def sources(batches: Examples | Mixture) -> Mapping[str, Examples]:
    """Return the examples of each corpus by name; a single corpus has the name ""."""
    return batches.sources if isinstance(batches, Mixture) else {"": batches}


def check_data(recipe: Recipe, corpora: Mapping[str, Corpus]) -> None:
    """Raise UserError if a resolved recipe cannot train on these corpora, without reading their text."""
    mixture_rates(recipe, corpora)
    for index in range(len(recipe.phases)):
        task_rates(recipe, corpora, index)
    for _, phase, task in every_task(recipe):
        for corpus in corpora_of(task, corpora).values():
            with naming(task):
                task.objective.rows(phase).check(corpus)
                task.objective.check(recipe.model, corpus, phase)
        batches = training_batches(recipe, corpora, phase, task)
        if isinstance(next(iter(sources(batches).values())), StreamExamples):
            batches.check_size()


def data_lines(recipe: Recipe, corpora: Mapping[str, Corpus], mesh: Mesh) -> list[str]:
    """List log lines on the rates of several corpora or tasks, and on how much text each of several processes reads."""
    lines = []
    if len(corpora) > 1 and not all(task.corpus for _, _, task in every_task(recipe)):
        rates = ", ".join(f"{rate:.2%} {name}" for name, rate in mixture_rates(recipe, corpora).items())
        lines.append(f"mixture={recipe.mixture}: the rows are {rates}")
    for index, phase in enumerate(recipe.phases):
        if phase.rates:
            examples = examples_of_tasks(recipe, corpora, index)
            each = task_rates(recipe, corpora, index).items()
            rates = ", ".join(f"{rate:.2%} {name} ({examples[name]:,} examples)" for name, rate in each)
            lines.append(f"phases.{index}.rates={phase.rates}: the steps are {rates}")
    lines += dict.fromkeys(
        f"--corpus {corpus.source}: the rows{f' of task {task.name}' if task.name else ''} leave out the {prefix} "
        "before each document"
        for _, phase, task in every_task(recipe)
        for corpus in corpora_of(task, corpora).values()
        if (prefix := prefix_field(corpus)) is not None and not task.objective.rows(phase).prefixed
    )
    files = [part.entry.files for corpus in corpora.values() for part in corpus.parts]
    if size() > 1 and len(files) > 1:
        lanes, batch_size = recipe.order.lanes, recipe.phases[0].batch_size
        mine = host_rows(mesh, batch_size)
        share = len(np.unique(mine // (batch_size // lanes))) / lanes
        total = sum(file["bytes"] for part in files for name, file in part.items() if name.startswith("train/"))
        read = f"{share:.0%} of the text, {share * total / 1e9:,.3g} GB, per epoch"
        line = f"order.lanes={lanes}: each of {size()} processes reads {read}"
        cure = f"; --order.lanes {size()}, in another --workdir, would give each its own parts"
        lines.append(line + cure * (lanes < size() and len(mine) * size() == batch_size))
    return lines


def phase_batches(
    recipe: Recipe, corpora: Mapping[str, Corpus], step: int, file: Path, say: Callable[[str], None]
) -> dict[int, Tasks]:
    """Make the batches of the phases that remain after `step` steps.   file, say: see `count_examples`."""
    phases = {phase_at(recipe, at) for at in (step, *boundaries(recipe)) if step <= at < recipe.steps}
    tasks = [(index, phase, task) for index, phase, task in every_task(recipe) if index in phases]
    sizes = count_examples(file, [training_batches(recipe, corpora, *task) for _, *task in tasks], say)
    by_phase: dict[int, dict[str, Examples | Mixture]] = {index: {} for index in sorted(phases)}
    for (index, phase, task), known in zip(tasks, sizes, strict=True):
        by_phase[index][task.name] = training_batches(recipe, corpora, phase, task, known)
    return {index: Tasks(batches, task_rates(recipe, corpora, index)) for index, batches in by_phase.items()}


def count_examples(file: Path, batches: Sequence[Examples | Mixture], say: Callable[[str], None]) -> list[Sizes]:
    """Count the examples of all parts for each of `batches`, which takes planning their rows. Each host counts its
    share. `file`, in the work directory, keeps the counts; if it is damaged, they are recounted."""
    counted = from_first("examples of parts", lambda: read_object(file) or {})
    wanted = {}
    for examples in (source for some in batches for source in sources(some).values() if _has_parts(source)):
        wanted |= {key: (examples, index) for index, key in enumerate(_keys(examples)) if key not in counted}
    if wanted:
        say(f"counting the examples of {len(wanted)} parts")
        mine = list(wanted.items())[number() :: size()]
        found = gather("examples of parts", lambda: {key: examples.count(index) for key, (examples, index) in mine})
        counted |= {key: count for part in found for key, count in part.items()}
        if is_first():
            write_whole(file, json.dumps(counted, indent=0))

    def of_parts(examples):
        return [counted[key] for key in _keys(examples)] if _has_parts(examples) else None

    return [{name: of_parts(examples) for name, examples in sources(some).items()} for some in batches]


def _has_parts(examples: Examples) -> bool:
    """Return whether examples must be counted; for a single part, its plan says how many there are."""
    return isinstance(examples, RowExamples) and len(examples.parts) > 1


def _keys(examples: RowExamples) -> list[str]:
    """Return a key for each part, of everything that determines its number of examples."""
    parts = (f"{part.entry.fingerprint} {examples.seed} {examples.layout}" for part in examples.parts)
    return [hashlib.sha256(key.encode()).hexdigest()[:32] for key in parts]
