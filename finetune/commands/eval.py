"""`python -m finetune eval`: predicts the examples of a file with a finetuned model and computes metrics."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional

from data_pipelines.command_line import Place, parse, unknown
from data_pipelines.durable import writing
from data_pipelines.errors import UserError
from finetune.evaluators import Development, figures_of
from finetune.predict import Predictor
from finetune.registry import TASKS
from finetune.task import Examples, FinetuningTask
from finetune.tasks.answer import Answer
from models.core.ranges import COUNT
from pretrain.commands.common import check_file
from pretrain.options import check_options
from pretrain.recipe import group_of, tasks_of
from pretrain.storage.best import LOSS, SCORE
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory, write_whole
from pretrain.training.opened import Opened, open_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predict the examples of a file with a finetuned model, and print metrics if the file has labels."""

    run: Positional[Place]
    """Work directory of the run."""
    test: Path
    """File of examples in the format of the training file; labels are optional."""
    predictions: Path | None = None
    """File to write predictions to: one JSON object a line, in the order of the examples. For answer, a name that ends
    in .json gets the format that SQuAD's evaluation script reads."""
    top: int = 1
    """For answer, the number of best answers, with scores, to write to --predictions."""
    task: str = ""
    """Task of the file, if the run has several tasks."""
    step: int | None = None
    """Step of the checkpoint; by default the best one on --dev."""

    def __post_init__(self):
        check_options(self, {"top": COUNT})


def main(arguments: Sequence[str]) -> int:
    options = parse(Evaluation, arguments, "python -m finetune eval")
    if options.predictions is not None:
        if options.predictions.resolve() == options.test.resolve():
            raise UserError(f"--predictions {options.predictions}: would overwrite --test; give another file")
        check_file(options.predictions)
    task, figures, answers = evaluate(options)
    if options.predictions is not None:
        with writing(options.predictions):
            write_whole(options.predictions, task.written(answers, options.predictions.suffix))
    for name, value in figures.items():
        if name != SCORE:
            print(f"{name:>16}  {value:.4f}")
    return 0


def evaluate(options: Evaluation) -> tuple[FinetuningTask, dict[str, float], list[dict]]:
    """Return the task, the metrics (empty for a file without labels) and the answers."""
    opened = open_model(options.run, options.step, best_of=LOSS if options.step is None else None)
    task, labels = finetuned(opened, options.task)
    if options.top > 1:
        if not isinstance(task, Answer) or options.predictions is None or options.predictions.suffix == ".json":
            what = "needs a run on answer and --predictions with a name that ends in .jsonl"
            raise UserError(f"--top {options.top}: {what}; give these, or leave it out")
        task = dataclasses.replace(task, top=options.top)
    examples = task.read(options.test, is_labelled=False)
    unlabelled = [example.where for example in examples if example.label is None]
    if unlabelled and (len(unlabelled) < len(examples) or options.predictions is None):
        cure = "give --predictions" if len(unlabelled) == len(examples) else "label every example or none"
        raise UserError(f"{unlabelled[0]}: has no label; {cure}")
    return task, *answered(opened, task, labels, examples)


def answered(
    opened: Opened, task: FinetuningTask, labels: Sequence[str], examples: Examples
) -> tuple[dict[str, float], list[dict]]:
    """Return a run's metrics on a task (empty for examples without labels) and its answers."""
    task = task.fitted(examples)
    length = max(phase.length for phase in opened.recipe.phases)
    data = Development(examples, task.encode(examples, opened.tokenizer, labels, length), labels, opened.tokenizer)
    predictor = Predictor(task, opened.run.assembly, opened.mesh, length)
    console = Console(stderr=True)
    columns = TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("", total=len(data.rows))
        tell = lambda done: bar.advance(shown, done)
        return figures_of(task, predictor, opened.params, {}, data, tell)


def finetuned(opened: Opened, name: str) -> tuple[FinetuningTask, list[str]]:
    """Return a run's task of this name ('' if it has only one), with settings chosen on --dev, and its labels."""
    tasks = {group_of(one.name): one.objective for one in tasks_of(opened.recipe, opened.recipe.phases[-1])}
    if name not in tasks:
        raise UserError(unknown("--task: this run has no task", name or "without a name", tasks))
    task = tasks[name]
    if not isinstance(task, FinetuningTask):
        raise UserError(f"{opened.source}: was not finetuned on a task ({', '.join(TASKS)}); give a finetuned run")
    begin, end = task.part
    all_labels = getattr(opened.config, "labels", ())  # models that write texts have no labels
    labels = [label.removeprefix(f"{name}/") for label in all_labels[begin : end or None]]
    return task.chosen(figures_by_dev(opened.source, opened.step, name)), labels


def figures_by_dev(run: Path, step: int, task: str) -> dict[str, float]:
    """Return a task's metrics ('' for a run with one task) from the last evaluation up to a step."""
    before = [entry for entry in read_metrics(RunDirectory(run), "eval") if entry["step"] <= step]
    prefix, figures = f"{task}/" if task else "", before[-1].items() if before else ()
    return {name.removeprefix(prefix): value for name, value in figures if name.startswith(prefix)}
