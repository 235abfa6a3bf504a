"""`python -m finetune run TASK`: finetunes a model on a task's files, or goes on in the same work directory."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from data_pipelines.command_line import Place, parse, unknown
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from data_pipelines.tokenizers import stored
from finetune.evaluators import Development, DevelopmentSets
from finetune.recipe import recipe_of, source_model, with_labels
from finetune.registry import TASKS
from finetune.rows import TaskData
from finetune.task import FinetuningTask
from models.core.ranges import COUNT, POSITIVE, SEED, SHARE
from pretrain.commands.arguments import UNNAMED
from pretrain.commands.platform import keep_compiled_with
from pretrain.optimizers import Optimizer
from pretrain.options import How, Options, check_options
from pretrain.recipe import LENGTH
from pretrain.schedules import Schedule
from pretrain.storage import run_directory
from pretrain.storage.journal import Warnings

RANGES = {"epochs": POSITIVE, "batch_size": COUNT, "length": LENGTH, "warmup": SHARE, "seed": SEED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(How):
    """What a run of finetuning begins with, and how it goes."""

    source: Annotated[Place, arg(name="from")]
    """The model: a run's work directory, or a Hugging Face folder."""
    train: Path
    """File of the examples to train on: .tsv or .csv with a line of names, .jsonl or .parquet; of questions SQuAD's
    .json."""
    dev: Path
    """File of the examples to evaluate on, after each epoch: the best checkpoint stays."""
    workdir: Place
    """Where the run keeps everything; the same directory resumes."""
    epochs: float = 3.0
    """How often each example comes."""
    batch_size: int = 32
    """Rows of a step."""
    length: int = 128
    """Tokens of a row, at most."""
    peak: float = 5e-5
    """The highest learning rate, from which it falls linearly to 0."""
    warmup: float = 0.1
    """Share of the steps in which the rate rises."""
    decay: float = 0.01
    """Weight decay of matrices and embeddings."""
    seed: int = 0
    """Of the head's first weights, the order of rows and dropout."""
    log_every: int = 10
    """Steps between two lines of figures."""
    eval_every: int | None = None
    """Steps between two evaluations; by default those of an epoch."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; by default those of an epoch."""
    patience: int = 0
    """Stop when so many evaluations have come after the best one; 0 never does."""
    track: tuple[str, ...] = ()
    """Also send the figures to wandb (Weights & Biases), trackio (Hugging Face), or both."""

    def __post_init__(self):
        check_options(self, RANGES)


def main(arguments: Sequence[str]) -> int:
    task, options = parse_run(arguments)
    from pretrain.training.signals import stop_request
    from tpu.compiled import keep_programs_whole

    keep_compiled_with(options.workdir)
    keep_programs_whole()
    with stop_request() as stop:
        return finetune(task, options, stop)


def parse_run(arguments: Sequence[str]) -> tuple[FinetuningTask, Run]:
    """`classify --from RUN --train FILE --dev FILE --workdir DIR` -> the task with its fields, and how it is run."""
    name, *rest = arguments or [""]
    if name not in TASKS:
        what = "run: name a task first, as in `python -m finetune run classify`; there is no"
        raise UserError(unknown(what, name, TASKS))
    fields = [("options", Annotated[Run, UNNAMED]), ("task", Annotated[TASKS[name], UNNAMED])]
    both = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    both.__doc__ = f"Finetune a model: {TASKS[name].__doc__}"
    try:
        parsed = parse(both, rest, f"python -m finetune run {name}")
    except ValueError as error:  # a task's own check
        raise UserError(str(error)) from None
    return parsed.task, parsed.options


def finetune(task: FinetuningTask, options: Run, stop: Any = None) -> int:
    """Finetune on a task, from the newest checkpoint in the work directory if it has one -> exit status, as of
    `pretrain.training.run.run`."""
    doing("reading the task")
    config, made = source_model(options.source)
    task = task.suited(config)
    train, dev = task.read(options.train), task.read(options.dev)
    task, labels = task.fitted([*train, *dev]), task.labels_of(train)
    rows = {split: task.encode(of, made, labels, options.length) for split, of in (("train", train), ("heldout", dev))}
    has_head = any(isinstance(asked, str) for asked in task.asks)
    model = with_labels(options.source, config, labels) if has_head else config
    optimizer, schedule = Optimizer(decay=options.decay), Schedule(peak=options.peak, warmup=options.warmup)
    lengths = [rows[split].lengths for split in ("train", "heldout")]
    of = (options.length, options.batch_size, options.epochs, optimizer, schedule, options.seed)
    recipe = recipe_of(options.workdir.name, model, task, lengths, *of)
    epoch = max(1, -(-len(rows["train"]) // options.batch_size))
    with tempfile.TemporaryDirectory() as folder, Warnings() as warnings:
        run_directory.check_writable(options.workdir)
        stored.save(made, Path(folder))
        data = {"": TaskData(rows, str(options.train), Path(folder), model.vocab_size)}
        sets = {"": Development(dev, rows["heldout"], labels, made)}
        evaluators = lambda stages, corpora, examples: DevelopmentSets(sets, stages)
        from pretrain.training.run import run_on

        return run_on(data, recipe, run_options(options, epoch), warnings, stop, evaluators)


def run_options(options: Run, epoch: int) -> Options:
    """How pretraining's loop is to run it.   epoch: steps of one."""
    shared = {field.name for field in dataclasses.fields(Options)} & {field.name for field in dataclasses.fields(Run)}
    given = {name: getattr(options, name) for name in shared}
    given |= {name: given[name] or epoch for name in ("eval_every", "checkpoint_every")}
    begins = {"init_from": str(options.source), "init_heads_anew": True}
    return Options(corpus=str(options.train), keep=1, keep_best=True, **begins, **given)
