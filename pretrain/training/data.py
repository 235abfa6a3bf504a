"""What a run trains on: corpora in the recipe's order and at its mixture's rates, and tasks at theirs."""

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
from pretrain.objectives.objective import Phase, Task
from pretrain.recipe import Recipe, boundaries, every_task, naming, phase_at, tasks_of
from pretrain.storage.run_directory import read_object, write_whole
from tpu.batches import host_rows
from tpu.cluster import from_first, gather, is_first, number, size

Sizes = Mapping[str, Sequence[int] | None]  # by corpus, the examples of each of its parts, None for those of one part


def training_batches(
    recipe: Recipe, corpora: Mapping[str, Corpus], phase: Phase, task: Task, sizes: Sizes | None = None
) -> Examples | Mixture:
    """The batches of a task. sizes: where they are known. UserError where they cannot be made."""
    layout, read = task.objective.rows(phase), corpora_of(task, corpora)
    seed = noise.key(recipe.seed, "task", task.name) if task.name else recipe.seed
    shape = (phase.batch_size, seed, recipe.order)
    if len(read) == 1:
        (corpus,), known = read.values(), sizes and next(iter(sizes.values()))
        return make_examples(layout, corpus, "train", *shape, known)
    rates = list(mixture_rates(recipe, read).values())
    return make_mixture(dict.fromkeys(read, layout), read, rates, *shape, sizes)


def corpora_of(task: Task, corpora: Mapping[str, Corpus]) -> Mapping[str, Corpus]:
    """Those that a task reads, by name; UserError where --corpus has not the one that it names."""
    if task.corpus and task.corpus not in corpora:
        there = ", ".join(filter(None, corpora)) or "one without a name"
        raise UserError(f"--corpus: task {task.name} reads {task.corpus}=DIR, there is {there}; give it, too")
    return {task.corpus: corpora[task.corpus]} if task.corpus else corpora


def mixture_rates(recipe: Recipe, corpora: Mapping[str, Corpus]) -> dict[str, float]:
    """How often the rows of each corpus come, by name; the sum is 1."""
    sizes = {name: corpus.size("train")["tokens"] for name, corpus in corpora.items()}
    return parse_rates(recipe.mixture, sizes)


def examples_of_tasks(recipe: Recipe, corpora: Mapping[str, Corpus], index: int) -> dict[str, int]:
    """About how many examples each task of a phase has, by name."""
    phase = recipe.phases[index]
    return {
        task.name: sum(task.objective.rows(phase).examples_of(corpus.size("train")) for corpus in read.values())
        for task in tasks_of(recipe, phase)
        for read in [corpora_of(task, corpora)]
    }


def task_rates(recipe: Recipe, corpora: Mapping[str, Corpus], index: int) -> dict[str, float]:
    """How often each task of a phase comes, by name."""
    phase = recipe.phases[index]
    if not phase.rates:
        return {task.name: task.rate for task in tasks_of(recipe, phase)}
    return parse_rates(phase.rates, examples_of_tasks(recipe, corpora, index), f"phases.{index}.rates")


def sources(batches: Examples | Mixture) -> Mapping[str, Examples]:
    """The examples of each corpus, by name; of a single one without."""
    return batches.sources if isinstance(batches, Mixture) else {"": batches}


def check_data(recipe: Recipe, corpora: Mapping[str, Corpus]) -> None:
    """UserError where a resolved recipe cannot train on these corpora, as far as it shows without their text."""
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


def said_of_data(recipe: Recipe, corpora: Mapping[str, Corpus], mesh: Mesh) -> list[str]:
    """Of several corpora or tasks, at which rates they come; of several processes, how much of the parts each reads."""
    said = []
    if len(corpora) > 1 and not all(task.corpus for _, _, task in every_task(recipe)):
        rates = ", ".join(f"{rate:.2%} {name}" for name, rate in mixture_rates(recipe, corpora).items())
        said.append(f"mixture={recipe.mixture}: the rows are {rates}")
    for index, phase in enumerate(recipe.phases):
        if phase.rates:
            examples = examples_of_tasks(recipe, corpora, index)
            each = task_rates(recipe, corpora, index).items()
            rates = ", ".join(f"{rate:.2%} {name} ({examples[name]:,} examples)" for name, rate in each)
            said.append(f"phases.{index}.rates={phase.rates}: the steps are {rates}")
    said += dict.fromkeys(
        f"--corpus {corpus.source}: the rows{f' of task {task.name}' if task.name else ''} leave out the {prefix} that "
        "stands before each document"
        for _, phase, task in every_task(recipe)
        for corpus in corpora_of(task, corpora).values()
        if (prefix := prefix_field(corpus)) is not None and not task.objective.rows(phase).prefixed
    )
    files = [part.entry.files for corpus in corpora.values() for part in corpus.parts]
    if size() > 1 and len(files) > 1:
        lanes, batch_size = recipe.order.lanes, recipe.phases[0].batch_size
        mine = host_rows(mesh, batch_size)
        share = len(np.unique(mine // (batch_size // lanes))) / lanes
        size_of = sum(one["bytes"] for of in files for name, one in of.items() if name.startswith("train/"))
        read = f"{share:.0%} of the text, {share * size_of / 1e9:,.3g} GB, in an epoch"
        line = f"order.lanes={lanes}: each of {size()} processes reads {read}"
        cure = f"; --order.lanes {size()}, in another --workdir, would give each parts of its own"
        said.append(line + cure * (lanes < size() and len(mine) * size() == batch_size))
    return said


def phase_batches(
    recipe: Recipe, corpora: Mapping[str, Corpus], step: int, file: Path, say: Callable[[str], None]
) -> dict[int, Tasks]:
    """The batches of the phases that are still to come after so many steps. file, say: see `count_examples`."""
    phases = {phase_at(recipe, at) for at in (step, *boundaries(recipe)) if step <= at < recipe.steps}
    tasks = [(index, phase, task) for index, phase, task in every_task(recipe) if index in phases]
    sizes = count_examples(file, [training_batches(recipe, corpora, *of) for _, *of in tasks], say)
    made: dict[int, dict[str, Examples | Mixture]] = {index: {} for index in sorted(phases)}
    for (index, phase, task), of in zip(tasks, sizes, strict=True):
        made[index][task.name] = training_batches(recipe, corpora, phase, task, of)
    return {index: Tasks(batches, task_rates(recipe, corpora, index)) for index, batches in made.items()}


def count_examples(file: Path, batches: Sequence[Examples | Mixture], say: Callable[[str], None]) -> list[Sizes]:
    """Of the batches of each phase, the examples of all parts, which only planning tells. Each host counts its share;
    the file, in the work directory, keeps them; where it is damaged they are counted anew."""
    counted = from_first("examples of parts", lambda: read_object(file) or {})
    wanted = {}
    for examples in (of for one in batches for of in sources(one).values() if _has_parts(of)):
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

    return [{name: of_parts(examples) for name, examples in sources(one).items()} for one in batches]


def _has_parts(examples: Examples) -> bool:
    """Whether they have to be counted: the plan of a single part says how many there are, and is kept."""
    return isinstance(examples, RowExamples) and len(examples.parts) > 1


def _keys(examples: RowExamples) -> list[str]:
    """What decides how many examples each part has."""
    parts = (f"{part.entry.fingerprint} {examples.seed} {examples.layout}" for part in examples.parts)
    return [hashlib.sha256(key.encode()).hexdigest()[:32] for key in parts]
