"""A run of finetuning: tasks are read, become a recipe, and train as pretraining does."""

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

from data_pipelines.cloud import is_file, local_folder
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
from finetune.texts import ending, fitting
from models.blocks.heads import TASK_HEADS
from models.families.electra import ElectraConfig
from models.families.registry import FAMILIES, family_of, name_of
from pretrain.huggingface.config import config_from, folders
from pretrain.lora import Lora
from pretrain.objectives.objective import Task
from pretrain.optimizers import Optimizer
from pretrain.options import Options
from pretrain.recipe import Recipe, to_json
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
    """A task whose files are read.   rows: of 'train' and 'heldout'."""

    task: FinetuningTask
    rows: dict[str, Rows]
    dev: Development

    @property
    def number(self) -> int:
        """Rows to train on."""
        return len(self.rows["train"])


class Inputs(NamedTuple):
    """What a run is made of, but its options.   model: its config, with labels.   weights: `weights_of` --from.
    length: of rows, at most."""

    model: Any
    made: Made
    weights: str
    length: int
    read: Mapping[str, Read]


class Programs:
    """What runs in this process have read, traced and compiled: others that differ by the seed alone take it.

    placed: the last run.   evaluators: as of `run_on`, of the same files.
    """

    inputs: Inputs | None = None
    placed: Placed | None = None
    evaluators: DevelopmentSets | None = None


def finetune(
    tasks: Mapping[str, Files],
    options: Training,
    stop: StopRequest | None = None,
    programs: Programs | None = None,
) -> int:
    """Finetune on tasks by name, on one alone with the name ''; or go on -> exit status, as of
    `pretrain.training.run.run`. UserError as there, and for files that are malformed."""
    programs = programs or Programs()
    with tempfile.TemporaryDirectory() as folder, Warnings() as warnings:
        run_directory.check_writable(options.workdir)
        made = []

        def fingerprints() -> str:
            made.append(prepared(tasks, options, Path(folder), programs))
            return written({name: one.fingerprint[:12] for name, one in made[0][1].items()})

        agree("the fingerprint of --train and --dev", fingerprints)
        recipe, data, evaluators, run_options = made[0]
        _check_unchanged(options, data, recipe)
        with _in_words_of_finetuning():
            status, programs.placed = run_on(data, recipe, run_options, warnings, stop, evaluators, programs.placed)
        return status


@contextlib.contextmanager
def _in_words_of_finetuning() -> Iterator[None]:
    """Errors of pretraining name the options that are given here."""
    try:
        yield
    except UserError as error:
        said = str(error).replace("--init-from", "--from").replace("--schedule.", "--").replace("phases.0.", "--")
        raise type(error)(said) from error.__cause__


def _check_unchanged(options: Training, data: Mapping[str, TaskData], recipe: Recipe) -> None:
    """UserError where the run in the work directory began with other weights or other rows."""
    workdir = options.workdir
    before = run_directory.states(workdir)
    if not before:
        return
    directory, begins = RunDirectory(workdir), None if options.from_scratch else str(options.source)
    began = directory.read_run()["init_from"]
    if began != begins:
        raise UserError(
            f"--workdir {workdir}: was begun with {began or 'random weights'}, not with {begins or 'random weights'}; "
            "give --from and --from-scratch as then, or use another --workdir"
        )
    recipe_before = directory.read_recipe()
    if recipe_before.source != recipe.source:
        raise UserError(
            f"--from {begins}: has other weights than those with which --workdir {workdir} was begun; restore them, or "
            "use another --workdir"
        )
    if changes := _changed_options(recipe_before, recipe):
        raise UserError(
            f"--workdir {workdir}: was begun with other options ({'; '.join(changes)}); give these, or use another "
            "--workdir"
        )
    if before != {name: one.fingerprint for name, one in data.items()}:
        files = " and ".join(one.source for one in data.values())
        raise UserError(
            f"--workdir {workdir}: was begun with other examples than those of {files} and --dev as they are now; "
            "restore the files and options that make the rows, or use another --workdir"
        )


def _changed_options(before: Recipe, now: Recipe) -> list[str]:
    """'--peak 0.001, now 0.01' of what `finetune run` calls the fields in which two recipes differ, but for `steps`."""
    old, new = (run_directory.flat(json.loads(to_json(one))) for one in (before, now))
    fields = *dataclasses.fields(Training), *dataclasses.fields(now.objective)
    known = {field.name for field in fields if Suppress not in getattr(field.type, "__metadata__", ())}
    found = {}
    for name in sorted(old | new):
        if old.get(name) != new.get(name):
            for option in [part for part in name.split(".") if part in known][:1]:
                found.setdefault(option, f"--{option.replace('_', '-')} {old.get(name)}, now {new.get(name)}")
    return [*found.values()]


def prepared(
    tasks: Mapping[str, Files], options: Training, folder: Path, programs: Programs
) -> tuple[Recipe, dict[str, TaskData], Callable, Options]:
    """(the recipe, the rows by task, what makes evaluators, how pretraining's loop is to run it).

    folder: for the tokenizer's files.
    """
    of = programs.inputs = programs.inputs or _inputs(tasks, options)
    model, read, options = of.model, of.read, dataclasses.replace(options, length=of.length)
    recipe = recipe_of(read, model, options)
    if not options.from_scratch:
        recipe = dataclasses.replace(recipe, source=f"finetuning of weights {of.weights}")
    epoch = max(1, -(-sum(one.number for one in read.values()) // options.batch_size))
    sets = {name: one.dev for name, one in read.items()}

    def evaluators(stages, corpora, examples):
        programs.evaluators = programs.evaluators or DevelopmentSets(sets, stages)
        return programs.evaluators

    stored.save(of.made, folder)
    data = {}
    for name, one in read.items():
        right = repr([example.label for example in one.dev.examples])
        data[name] = TaskData(one.rows, str(tasks[name].train), folder, model.vocab_size, right)
    return recipe, data, evaluators, loop_options(options, epoch, tasks)


def _inputs(tasks: Mapping[str, Files], options: Training) -> Inputs:
    doing("reading the task")
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
    config = served(config, max(buckets(rows.lengths)[-1] for one in read.values() for rows in one.rows.values()))
    model = dataclasses.replace(config, labels=tuple(labels)) if hasattr(config, "labels") else config
    return Inputs(model, made, weights_of(options.source), options.length, read)


def weights_of(source: Path) -> str:
    """What tells the weights that a run or a Hugging Face folder has from others, earlier or later, at its place: of a
    run when its newest checkpoint was written, of a folder the content of its files."""
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


def source_model(source: Path) -> tuple[Any, Made]:
    """The config and the tokenizer of a run or of a Hugging Face folder. UserError where it is neither."""
    directory = RunDirectory(source)
    if is_file(directory.recipe):
        with local_folder(directory.tokenizer) as folder:
            config, made = directory.read_recipe().model, stored.load(folder)
        return _as_finetuned(config, made)
    if not is_file(directory.path / "config.json"):
        raise UserError(f"--from {source}: is no run, and no Hugging Face folder; give one of them")
    with local_folder(directory.path) as folder:
        config = config_from(folder, FAMILIES["electra-encoder"])
        return _as_finetuned(config, stored.load(next(iter(folders(folder, family_of(config)).values()))))


def _as_finetuned(config: Any, made: Made) -> tuple[Any, Made]:
    """Of an ELECTRA its discriminator's encoder; of a model that reads from left to right the tokenizer `ending`
    texts."""
    config = config.encoder("discriminator") if isinstance(config, ElectraConfig) else config
    if not is_causal(config):
        return config, made
    made = ending(made)
    return dataclasses.replace(config, vocab_size=max(config.vocab_size, made.tokenizer.get_vocab_size())), made


def check_heads(source: Path, config: Any, tasks: Sequence[FinetuningTask]) -> None:
    """UserError where a model has no such heads as tasks ask for."""
    known = [head.name for head in family_of(config).heads]
    for name in (asked for task in tasks for asked in task.asks):
        if isinstance(name, str) and name not in known:
            heads = [head for head in TASK_HEADS if head in known]
            have = f"its heads for tasks are {', '.join(heads)}" if heads else "it has none for tasks"
            raise UserError(f"--from {source}: {name_of(config)} has no head {name!r}, {have}; take another model")


def _read(files: Files, config: Any, made: Made, options: Training) -> Read:
    task = files.task.suited(config)
    train, dev = task.read(files.train), task.read(files.dev)
    labels = task.labels_of(train)
    if options.examples is not None:
        (chosen,) = spread(len(train), options.examples, len(train))
        train = [train[index] for index in chosen]
    task = task.fitted([*train, *dev])
    rows = {split: task.encode(of, made, labels, options.length) for split, of in (("train", train), ("heldout", dev))}
    return Read(task, rows, Development(dev, rows["heldout"], labels, made))


def recipe_of(read: Mapping[str, Read], model: Any, options: Training) -> Recipe:
    """Each bucket of each task as a task of one phase, which comes as often as it has rows."""
    tasks, number = [], sum(one.number for one in read.values())
    for name, one in read.items():
        lengths = one.rows["train"].lengths
        ends = buckets(np.maximum(lengths, shortest(model, options.length)), longest=options.length)
        ends = with_rows(ends, lengths, options.batch_size)
        for above, end in zip([0, *ends], ends, strict=False):
            rows = int(((lengths > above) & (lengths <= end)).sum())
            of_bucket = dataclasses.replace(one.task, bucket=(above, end))
            tasks.append(Task(f"{name}:{end}", of_bucket, float(rows), name))
    first = tasks[0].objective
    trunk = tuple(dict.fromkeys(row.path.partition("/")[0] for row in family_of(model).table(model)))
    return Recipe(
        name=options.workdir.name,
        source="finetuning",
        model=model,
        objective=first,
        optimizer=Optimizer(decay=options.decay, layer_decay=options.layer_decay),
        schedule=Schedule(peak=options.peak, warmup=options.warmup),
        phases=(first.phase(1.0, options.length, options.batch_size, tasks=tuple(tasks), **first.sizes),),
        steps=math.ceil(number * options.epochs / options.batch_size),
        seed=options.seed,
        frozen=trunk if options.lora else options.frozen,
        lora=Lora(options.lora) if options.lora else None,
    )


def loop_options(options: Training, epoch: int, tasks: Mapping[str, Files]) -> Options:
    """How pretraining's loop is to run it.   epoch: steps of one."""
    known = {field.name for field in dataclasses.fields(Options)}
    shared = [field.name for field in dataclasses.fields(Training) if field.name in known]
    given = {name: getattr(options, name) for name in shared}
    given |= {name: epoch if given[name] is None else given[name] for name in ("eval_every", "checkpoint_every")}
    begins = {} if options.from_scratch else {"init_from": str(options.source), "init_heads_anew": True}
    corpus = ",".join(str(files.train) for files in tasks.values())
    return Options(corpus=corpus, keep=1, keep_best=True, **begins, **given)
