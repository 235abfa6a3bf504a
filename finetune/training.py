"""A finetuning run: reads the tasks, makes a recipe of them and trains it with pretraining's loop."""

import contextlib
import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tyro.conf import Suppress

from data_pipelines.cloud import is_file, local_folder, place
from data_pipelines.corpus import written
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import spread
from data_pipelines.progress import doing
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import Made
from finetune.evaluators import Development, DevelopmentSets
from finetune.options import Training
from finetune.patterns import served, shortest
from finetune.rows import Rows, TaskData, buckets, with_rows
from finetune.task import FinetuningTask, is_causal
from finetune.teaching import TEACHER, Layers
from finetune.texts import ending, fitting
from models.blocks.heads import TASK_HEADS
from models.families.deberta import DebertaV3Config
from models.families.electra import ElectraConfig
from models.families.registry import FAMILIES, family_of, name_of
from pretrain.huggingface.config import config_from, folders
from pretrain.huggingface.load import label_places
from pretrain.lora import Lora
from pretrain.objectives.objective import Task, Teacher
from pretrain.optimizers import Optimizer
from pretrain.options import Options
from pretrain.recipe import Recipe, model_in, to_json
from pretrain.schedules import Schedule
from pretrain.storage import run_directory
from pretrain.storage.checkpoints import ABOUT
from pretrain.storage.journal import Warnings
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.placement import Placed
from pretrain.training.run import run_on
from pretrain.training.signals import StopRequest
from tpu.cluster import agree


class Files(NamedTuple):
    """A task and its files."""

    task: FinetuningTask
    train: Path
    dev: Path


class Read(NamedTuple):
    """A task with the content of its files.   rows: those of 'train' and 'heldout'."""

    task: FinetuningTask
    rows: dict[str, Rows]
    dev: Development

    @property
    def number(self) -> int:
        """Number of rows to train on."""
        return len(self.rows["train"])


class Inputs(NamedTuple):
    """Everything that a run needs besides its options.   model: its config, with labels.   weights: hash of --from.
    length: maximum number of tokens in a row.   teachers: one or none."""

    model: Any
    made: Made
    weights: str
    length: int
    read: Mapping[str, Read]
    teachers: tuple[Teacher, ...]


class Programs:
    """Data and compiled programs that runs in this process share if they differ only in their seed.
    placed: the last run.   evaluators: those of `run_on`, for the same files."""

    inputs: Inputs | None = None
    placed: Placed | None = None
    evaluators: DevelopmentSets | None = None


def finetune(
    tasks: Mapping[str, Files], options: Training, stop: StopRequest | None = None, programs: Programs | None = None
) -> int:
    """Finetune on tasks by name (a single task has the name ''), or resume, and return the exit status.

    Exit status and UserError are as for `pretrain.training.run.run`; UserError also for malformed files."""
    programs = programs or Programs()
    with tempfile.TemporaryDirectory() as folder, Warnings() as warnings:
        run_directory.check_writable(options.workdir)
        results = []

        def fingerprints() -> str:
            results.append(prepared(tasks, options, Path(folder), programs))
            return written({name: one.fingerprint[:12] for name, one in results[0][1].items()})

        agree("the fingerprint of --train and --dev", fingerprints)
        recipe, data, evaluators, run_options = results[0]
        _check_unchanged(options, data, recipe)
        with _with_names_of_finetuning():
            status, programs.placed = run_on(data, recipe, run_options, warnings, stop, evaluators, programs.placed)
        return status


@contextlib.contextmanager
def _with_names_of_finetuning() -> Iterator[None]:
    """Translate option names in errors of pretraining to those of finetuning."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("--init-from", "--from").replace("--schedule.", "--").replace("phases.0.", "--")
        text = text.replace("teachers.0.source", "--teacher").replace("teachers.0.", "--teacher: its ")
        text = text.replace("the recipe the heads that it has", "one finetuned on this task")
        text = text.replace("objective.losses", "--intermediate").replace("leave this loss out, or use", "use")
        text = text.replace("give their numbers", "give --layers, like '1:3 2:6'")
        raise type(error)(text) from error.__cause__


def _check_unchanged(options: Training, data: Mapping[str, TaskData], recipe: Recipe) -> None:
    """Raise UserError if the run in the work directory began with other weights, options or rows."""
    workdir, random, wrong = options.workdir, "random weights", ""
    if not (before := run_directory.states(workdir)):
        return
    directory, began = RunDirectory(workdir), f"--workdir {workdir}: its run began with"
    old, new = directory.read_run()["init_from"], None if options.from_scratch else str(options.source)
    recipe_before = directory.read_recipe()
    if old != new:
        wrong = f"{began} {old or random}, not {new or random}; give --from and --from-scratch as then"
    elif recipe_before.source != recipe.source:
        wrong = f"--from {new}: its weights are not those that the run in --workdir {workdir} began with; restore them"
    elif changes := changed_options(recipe_before, recipe):
        wrong = f"{began} other options ({'; '.join(changes)}); give these"
    elif before != {name: one.fingerprint for name, one in data.items()}:
        files = " and ".join(one.source for one in data.values())
        wrong = f"{began} other examples than {files} and --dev have now; restore the files and options"
    if wrong:
        raise UserError(f"{wrong}, or use another --workdir")


def changed_options(before: Recipe, now: Recipe) -> list[str]:
    """Return '--peak 0.001, now 0.01' for each option of `finetune run` in which two recipes differ, except `steps`."""
    both = (dataclasses.replace(one, teachers=()) for one in (before, now))  # --teacher is of the objective
    old, new = (run_directory.flat(json.loads(to_json(one))) for one in both)
    fields = *dataclasses.fields(Training), *dataclasses.fields(now.objective)
    known = {field.name for field in fields if Suppress not in getattr(field.type, "__metadata__", ())}
    found = {}
    staged = "objective.intermediate"
    for name in sorted(old | new):
        if name == "phases.0.share" and old.get(name) != new.get(name) and old.get(staged) == new.get(staged):
            found["epochs"] = "another number of --epochs, which is fixed with --intermediate"
        if name.startswith("phases.") and name not in old.keys() & new.keys() or ".tasks." in name:
            continue  # there are as many phases as stages, and tasks as lengths of rows
        if old.get(name) != new.get(name):
            for option in [part for part in name.split(".") if part in known][:1]:
                found.setdefault(option, f"--{option.replace('_', '-')} {old.get(name)}, now {new.get(name)}")
    return [*found.values()]


def prepared(
    tasks: Mapping[str, Files], options: Training, folder: Path, programs: Programs
) -> tuple[Recipe, dict[str, TaskData], Callable, Options]:
    """Return the recipe, the data by task, a function that makes evaluators, and the options of pretraining's loop.
    folder: where to write the tokenizer's files."""
    inputs = programs.inputs = programs.inputs or _inputs(tasks, options)
    model, read, options = inputs.model, inputs.read, dataclasses.replace(options, length=inputs.length)
    recipe = dataclasses.replace(recipe_of(read, model, options), teachers=inputs.teachers)
    if not options.from_scratch:
        recipe = dataclasses.replace(recipe, source=f"finetuning of weights {inputs.weights}")
    epoch = max(1, -(-sum(one.number for one in read.values()) // options.batch_size))
    sets = {name: one.dev for name, one in read.items()}

    def evaluators(stages, corpora, examples):
        if any(isinstance(stage.task.objective, Layers) for stage in stages.values()):
            return lambda *of: {}  # the head is still random
        programs.evaluators = programs.evaluators or DevelopmentSets(sets, stages)
        return programs.evaluators

    stored.save(inputs.made, folder)
    data = {}
    for name, one in read.items():
        right = repr([example.label for example in one.dev.examples])
        data[name] = TaskData(one.rows, str(tasks[name].train), folder, model.vocab_size, right)
    return recipe, data, evaluators, loop_options(options, epoch, tasks)


def _inputs(tasks: Mapping[str, Files], options: Training) -> Inputs:
    doing("reading the task files")
    config, made = source_model(options.source)
    check_heads(options.source, config, [files.task for files in tasks.values()])
    options = dataclasses.replace(options, length=fitting(options.length, config))
    read, labels = {}, []
    for name, files in tasks.items():
        read[name] = one = _read(files, config, made, options)
        if name:
            part = len(labels), len(labels) + len(one.dev.labels)
            read[name] = one._replace(task=dataclasses.replace(one.task, part=part))
        labels += [f"{name}/{label}" if name else label for label in one.dev.labels]
    longest = max(buckets(rows.lengths)[-1] for one in read.values() for rows in one.rows.values())
    teachers = _teachers(read, made, options.workdir, longest)
    config = served(config, longest)
    has_labels = "labels" in {field.name for field in dataclasses.fields(config)}
    model = dataclasses.replace(config, labels=tuple(labels)) if has_labels else config
    return Inputs(model, made, weights_of(options.source), options.length, read, teachers)


def _teachers(read: Mapping[str, Read], made: Made, workdir: Path, longest: int) -> tuple[Teacher, ...]:
    """Return the teacher of a task with --teacher; it is not read if the run in `workdir` has it. UserError if it
    cannot teach.   made: the model's tokenizer.   longest: length of a row."""
    taught = [one for one in read.values() if getattr(one.task, "teacher", "")]
    if not taught:
        return ()
    task, labels, workdir = taught[0].task, taught[0].dev.labels, RunDirectory(workdir)
    before = workdir.read_recipe().teachers if workdir.checkpoint_steps() else ()
    if [teacher.source for teacher in before] == [task.teacher]:
        return before
    config, their_made = source_model(place(task.teacher), "--teacher")
    known, reason = getattr(config, "labels", ()), ""
    if len(read) > 1:
        reason = "teaches only a task that is trained alone"
    elif their_made.tokenizer.get_vocab() != made.tokenizer.get_vocab():
        reason = "has another tokenizer than --from"
    elif task.suited(config) != task:
        reason = f"is a {name_of(config)}, which reads other tokens of a row than the model in --from"
    elif task.intermediate and task.at_end and not task.causal:
        reason = f"is a {name_of(config)}, whose layers --intermediate does not compare"
    elif label_places(known, labels) is not None:
        config = dataclasses.replace(config, labels=tuple(labels))  # its head is read in their order
    elif not len(known) == len(labels) == 1:  # numbers may have other names
        reason = f"has the labels {', '.join(known)}, not {', '.join(labels)}" if known else "was not finetuned"
    if reason:
        raise UserError(f"--teacher {task.teacher}: {reason}; give another one, finetuned on this task")
    return (Teacher(TEACHER, task.teacher, served(config, longest), best=True),)


def weights_of(source: Path) -> str:
    """Return a hash that changes when the weights of a run or a Hugging Face folder change: of the description of a
    run's newest checkpoint, which says when it was written, or of the content of a folder's files."""
    directory, hashed = RunDirectory(source), hashlib.sha256()
    if is_file(directory.recipe):
        for step in directory.checkpoint_steps()[-1:]:
            hashed.update((directory.checkpoints / str(step) / ABOUT).read_bytes())
        return hashed.hexdigest()[:16]
    with local_folder(directory.path) as folder:
        for file in sorted(folder.rglob("*.safetensors")):
            with file.open("rb") as content:
                hashed.update(hashlib.file_digest(content, "sha256").digest())
    return hashed.hexdigest()[:16]


def source_model(source: Path, option: str = "--from") -> tuple[Any, Made]:
    """Return the config and tokenizer of a run or a Hugging Face folder. UserError names `option` if it is neither."""
    directory = RunDirectory(source)
    if is_file(directory.recipe):
        with local_folder(directory.tokenizer) as folder:
            config, made = model_in(recipe := directory.read_recipe(), len(recipe.phases) - 1), stored.load(folder)
        return _as_finetuned(config, made)
    if not is_file(directory.path / "config.json"):
        raise UserError(f"{option} {source}: is neither a run nor a Hugging Face folder; give one of them")
    with local_folder(directory.path) as folder:
        config = config_from(folder, FAMILIES["electra-encoder"])
        return _as_finetuned(config, stored.load(next(iter(folders(folder, family_of(config)).values()))))


def _as_finetuned(config: Any, made: Made) -> tuple[Any, Made]:
    """Return the config and tokenizer to finetune: of a generator and a discriminator the latter, and for a causal
    model the tokenizer that ends texts (`ending`)."""
    config = config.encoder("discriminator") if isinstance(config, DebertaV3Config | ElectraConfig) else config
    if not is_causal(config):
        return config, made
    made = ending(made)
    return dataclasses.replace(config, vocab_size=max(config.vocab_size, made.tokenizer.get_vocab_size())), made


def check_heads(source: Path, config: Any, tasks: Sequence[FinetuningTask]) -> None:
    """Raise UserError if the model lacks a head that a task needs."""
    known = [head.name for head in family_of(config).heads]
    for name in (asked for task in tasks for asked in task.asks):
        if isinstance(name, str) and name not in known:
            heads = [head for head in TASK_HEADS if head in known]
            have = f"its heads for tasks are {', '.join(heads)}" if heads else "it has no heads for tasks"
            raise UserError(f"--from {source}: {name_of(config)} has no head {name!r}, {have}; take another model")


def _read(files: Files, config: Any, made: Made, options: Training) -> Read:
    task = files.task.suited(config)
    train, dev = task.read(files.train), task.read(files.dev)
    labels = task.labels_of(train)
    if options.examples is not None:
        (chosen,) = spread(len(train), options.examples, len(train))
        train = [train[index] for index in chosen]
    task = task.fitted([*train, *dev])
    splits = {"train": train, "heldout": dev}
    rows = {split: task.encode(examples, made, labels, options.length) for split, examples in splits.items()}
    return Read(task, rows, Development(dev, rows["heldout"], labels, made))


def recipe_of(read: Mapping[str, Read], model: Any, options: Training) -> Recipe:
    """Return a recipe in which each length bucket of each task is drawn in proportion to its rows: with one phase, or
    with one of layers before it."""
    tasks, number = [], sum(one.number for one in read.values())
    for name, one in read.items():
        lengths = one.rows["train"].lengths
        ends = buckets(np.maximum(lengths, shortest(model, options.length)), longest=options.length)
        ends = with_rows(ends, lengths, options.batch_size)
        for above, end in zip([0, *ends], ends, strict=False):
            rows = int(((lengths > above) & (lengths <= end)).sum())
            of_bucket = dataclasses.replace(one.task, bucket=(above, end))
            tasks.append(Task(f"{name}:{end}", of_bucket, float(rows), name))
    first, schedule = tasks[0].objective, Schedule(peak=options.peak, warmup=options.warmup)
    parts, own = [(options.epochs, tasks)], None
    if before := getattr(first, "intermediate", 0.0):
        inside = [dataclasses.replace(task, objective=task.objective.inside()) for task in tasks]
        parts, own = [(before, inside), *parts], schedule  # over the steps of a part
    epochs, size = before + options.epochs, (options.length, options.batch_size)
    phases = [first.phase(part / epochs, *size, tasks=tuple(of), schedule=own, **first.sizes) for part, of in parts]
    trunk = tuple(dict.fromkeys(row.path.partition("/")[0] for row in family_of(model).table(model)))
    return Recipe(
        name="finetuning",
        source="finetuning",
        model=model,
        objective=first,
        optimizer=Optimizer(decay=options.decay, layer_decay=options.layer_decay),
        schedule=schedule,
        phases=tuple(phases),
        steps=math.ceil(number * epochs / options.batch_size),
        seed=options.seed,
        frozen=trunk if options.lora else options.frozen,
        lora=Lora(options.lora) if options.lora else None,
    )


def loop_options(options: Training, epoch: int, tasks: Mapping[str, Files]) -> Options:
    """Return the options of pretraining's loop.   epoch: its number of steps."""
    known = {field.name for field in dataclasses.fields(Options)}
    shared = [field.name for field in dataclasses.fields(Training) if field.name in known]
    given = {name: getattr(options, name) for name in shared}
    given |= {name: epoch if given[name] is None else given[name] for name in ("eval_every", "checkpoint_every")}
    start = {} if options.from_scratch else {"init_from": str(options.source), "init_heads_anew": True}
    corpus = ",".join(str(files.train) for files in tasks.values())
    return Options(corpus=corpus, keep=1, keep_best=True, **start, **given)
