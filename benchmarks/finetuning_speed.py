"""Finetuning on this CPU beside Hugging Face's Trainer, on the same rows and from the same weights, in one run.

    python -m benchmarks.finetuning_speed --run RUN --train FILE --dev FILE --text COLUMN [COLUMN] [--steps 100]
        [--seeds 5 --epochs 3 --peak 5e-4 --examples 4000]

RUN is a pretrained BERT or another whose export has a class there; the files are those of `finetune run classify`.
Ours is the step and the loader of `finetune run` with its buckets of length, and the prediction of `finetune eval`;
theirs Trainer with group_by_length and padding to the longest row of a batch. Each has all cores while the other waits.
Trainer needs `pip install accelerate`. A turn of training is so many steps, one of evaluation all of --dev; what is
read and tokenized before is in neither. With --seeds both are also trained whole so often, and their best accuracies on
--dev over the epochs are printed.
"""

import dataclasses
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.turns import Step, milliseconds, ratio, take_turns
from data_pipelines.command_line import end_with, parse
from pretrain.commands.platform import keep_memory, prepare_cpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Finetuning beside Hugging Face's Trainer."""

    run: Path
    """Work directory of a pretrained model."""
    train: Path
    """Examples to train on."""
    dev: Path
    """Examples to evaluate on."""
    text: tuple[str, ...] = ("text",)
    """The columns of one text or two."""
    label: str = "label"
    """The column of the classes."""
    steps: int = 100
    """Of a turn."""
    rounds: int = 5
    """Turns of each side."""
    batch_size: int = 32
    """Rows of a step."""
    length: int = 128
    """Tokens of a row, at most."""
    seeds: int = 0
    """Whole runs of each side."""
    epochs: int = 3
    """Of a whole run."""
    peak: float = 5e-5
    """The highest learning rate of a whole run."""
    examples: int | None = None
    """Of a whole run; by default all."""


def main(arguments: list[str]) -> int:
    options, cores = parse(Options, arguments, "python -m benchmarks.finetuning_speed"), sorted(os.sched_getaffinity(0))
    console = Console(width=110)
    table = Table("", "ours", "Trainer", "Trainer / ours", title=f"ms by wall (CPU) time, {len(cores)} threads")
    with tempfile.TemporaryDirectory() as folder:
        for what in ("training", "evaluation"):
            makers = {"ours": functools.partial(ours, options, what)}
            makers |= {"Trainer": functools.partial(theirs, options, what, Path(folder))}
            times = take_turns(makers, cores, options.rounds, warm_up=2)
            shown = [milliseconds(side) for side in times.values()]
            table.add_row(what, *shown, ratio(times["Trainer"], times["ours"]))
        console.print(table)
        for name, scores in (("ours", our_scores), ("Trainer", their_scores)) if options.seeds else ():
            found = 100 * np.array(scores(options, Path(folder)))
            each = " ".join(f"{score:.1f}" for score in found)
            console.print(f"{name}: accuracy {found.mean():.1f}, deviation {found.std(ddof=1):.1f} ({each})")
    return 0


def our_scores(options: Options, folder: Path) -> list[float]:
    """The best accuracy of each seed."""
    import finetune.registry  # noqa: F401 (a run's recipe names a task)
    from finetune.options import Training
    from finetune.tasks.classify import Classify
    from finetune.training import Files, Programs, finetune
    from pretrain.storage.journal import read_metrics
    from pretrain.storage.run_directory import RunDirectory

    files, programs = Files(Classify(text=options.text, label=options.label), options.train, options.dev), Programs()
    shared = {name: getattr(options, name) for name in ("batch_size", "length", "epochs", "peak", "examples")}
    found = []
    for seed in range(options.seeds):
        training = Training(source=options.run, workdir=folder / f"ours-{seed}", seed=seed, **shared)
        finetune({"": files}, training, None, programs)
        found.append(max(one["accuracy"] for one in read_metrics(RunDirectory(training.workdir), "eval")))
    return found


def their_scores(options: Options, folder: Path) -> list[float]:
    """The same of Trainer, whose optimizer, schedule and epochs are ours."""
    found = []
    for seed in range(options.seeds):
        settings = {"num_train_epochs": options.epochs, "learning_rate": options.peak, "seed": seed}
        settings |= {"warmup_steps": 0.1, "weight_decay": 0.01, "eval_strategy": "epoch"}
        trainer = trainer_of(options, folder, options.examples, **settings)
        trainer.train()
        found.append(max(one["eval_accuracy"] for one in trainer.state.log_history if "eval_accuracy" in one))
    return found


def ours(options: Options, what: str) -> Step:
    """A turn of ours."""
    prepare_cpu()
    keep_memory()
    import jax

    from data_pipelines.loader import Loader
    from finetune.options import Training
    from finetune.tasks.classify import Classify
    from finetune.training import Files, Programs, prepared
    from pretrain.options import How
    from pretrain.training.data import phase_batches
    from pretrain.training.placement import of_phase, place, place_given
    from pretrain.training.start import initial_weights
    from pretrain.training.step import initial_state
    from tpu.batches import host_rows, place_rows

    folder = tempfile.mkdtemp()
    training = Training(
        source=options.run, workdir=Path(folder), batch_size=options.batch_size, length=options.length, epochs=1000
    )
    files = Files(Classify(text=options.text, label=options.label), options.train, options.dev)
    recipe, data, evaluate, run_options = prepared({"": files}, training, Path(folder), Programs())
    placed = place(recipe, How(), jax.devices(), None)
    initial = initial_weights(placed, data[""], run_options)
    state, frozen = initial_state(placed.assembly, initial.weights)
    stages, batches = of_phase(placed.stages, 0), phase_batches(recipe, data, 0, Path(folder) / "counts", print)[0]
    if what == "evaluation":
        predict = evaluate(stages, data, 0)
        return lambda: predict(state.params, frozen, 0)["loss"]
    given, mine = place_given(next(iter(stages.values()))), host_rows(placed.mesh, options.batch_size)

    def turn() -> float:
        nonlocal state
        first = int(state.step)
        with Loader(batches, first, first + options.steps, mine) as loader:
            for step, rows in loader:
                task, _ = batches.at(step)
                batch = place_rows(rows, mine, options.batch_size, placed.mesh)
                state, metrics = stages[task].train.run(state, frozen, batch, given)
        return float(metrics.loss)

    return turn


def theirs(options: Options, what: str, folder: Path) -> Step:
    """A turn of Trainer's."""
    trainer = trainer_of(options, folder, max_steps=options.steps)
    if what == "evaluation":
        return lambda: trainer.evaluate()["eval_loss"]
    return lambda: trainer.train().training_loss


def trainer_of(options: Options, folder: Path, examples: int | None = None, **settings: Any) -> Any:
    """A Trainer of the exported model.   examples: how many to train on."""
    import transformers

    from data_pipelines.examples.layout import spread
    from finetune.tasks.classify import Classify
    from pretrain.commands.export import Export, export_model

    transformers.logging.set_verbosity_error()
    if not (folder / "config.json").exists():
        export_model(Export(run=options.run, to=folder))
    task = Classify(text=options.text, label=options.label)
    train, dev = task.read(options.train), task.read(options.dev)
    labels = task.labels_of(train)
    if examples is not None:  # those that `finetune run --examples` takes
        train = [train[index] for index in next(iter(spread(len(train), examples, len(train))))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def rows(examples) -> list[dict[str, Any]]:
        texts = [list(of) for of in zip(*(example.texts for example in examples), strict=True)]
        found = tokenizer(*texts, truncation=True, max_length=options.length)
        numbers = [labels.index(example.label) for example in examples]
        named = [{name: found[name][index] for name in found} for index in range(len(numbers))]
        return [
            of | {"labels": number, "length": len(of["input_ids"])} for of, number in zip(named, numbers, strict=True)
        ]

    transformers.set_seed(settings.get("seed", 0))  # of the head's first weights
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(labels))
    given = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=64,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    collator = transformers.DataCollatorWithPadding(tokenizer)
    right = lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}
    held_out = sorted(rows(dev), key=_length)
    trainer = transformers.Trainer(model, given, collator, rows(train), held_out, compute_metrics=right)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _length(row: dict[str, Any]) -> int:
    return row["length"]


if __name__ == "__main__":
    end_with(main)
