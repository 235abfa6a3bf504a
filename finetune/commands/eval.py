"""`python -m finetune eval`: what a finetuned model answers to a file, and how good that is."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional

from data_pipelines.command_line import Place, parse, unknown
from data_pipelines.errors import UserError
from finetune.evaluators import Development, figures_of
from finetune.predict import Predictor
from finetune.registry import TASKS
from finetune.task import Examples, FinetuningTask
from finetune.tasks.answer import Answer
from models.core.ranges import COUNT
from pretrain.commands.common import check_file, writing
from pretrain.options import check_options
from pretrain.recipe import group_of, tasks_of
from pretrain.storage.best import LOSS, SCORE
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory, write_whole

if TYPE_CHECKING:
    from pretrain.training.opened import Opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Answers of a finetuned model to the examples of a file, and figures where it says what is right."""

    run: Positional[Place]
    """Work directory of the run."""
    test: Path
    """File of examples, as those that the run was trained on; it may lack what is asked."""
    predictions: Path | None = None
    """File to write with the answers, a JSON object a line, in the order of the examples; of questions, if it ends in
    .json, as SQuAD's program reads them."""
    top: int = 1
    """Of questions, how many of the best answers --predictions has, with their scores."""
    task: str = ""
    """Of a run on several tasks, which one the file is of."""
    step: int | None = None
    """Which checkpoint; by default the best by --dev."""

    def __post_init__(self):
        check_options(self, {"top": COUNT})


def main(arguments: Sequence[str]) -> int:
    options = parse(Evaluation, arguments, "python -m finetune eval")
    if options.predictions is not None:
        if options.predictions.resolve() == options.test.resolve():
            raise UserError(f"--predictions {options.predictions}: is --test, which it would replace; give another")
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
    """(the task; figures, none where the file does not say what is right; the answers)."""
    from pretrain.training.opened import open_model

    opened = open_model(options.run, options.step, best_of=LOSS if options.step is None else None)
    task, labels = finetuned(opened, options.task)
    if options.top > 1:
        if not isinstance(task, Answer) or options.predictions is None or options.predictions.suffix == ".json":
            what = "is of answers to questions, in --predictions that end in .jsonl"
            raise UserError(f"--top {options.top}: {what}; give these, or leave it out")
        task = dataclasses.replace(task, top=options.top)
    examples = task.read(options.test, is_labelled=False)
    lacking = [example.where for example in examples if example.label is None]
    if lacking and (len(lacking) < len(examples) or options.predictions is None):
        cure = "give --predictions, to have the answers written" if len(lacking) == len(examples) else "give it one"
        raise UserError(f"{lacking[0]}: does not say what is right; {cure}")
    return task, *answered(opened, task, labels, examples)


def answered(
    opened: "Opened", task: FinetuningTask, labels: Sequence[str], examples: Examples
) -> tuple[dict[str, float], list[dict]]:
    """(figures, none where the examples do not say what is right; the answers) of a run on that task."""
    task = task.fitted(examples)
    length = max(phase.length for phase in opened.recipe.phases)
    of = Development(examples, task.encode(examples, opened.tokenizer, labels, length), labels, opened.tokenizer)
    predictor = Predictor(task, opened.run.assembly, opened.mesh, length)
    console = Console(stderr=True)
    columns = TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("", total=len(of.rows))
        tell = lambda done: bar.advance(shown, done)
        return figures_of(task, predictor, opened.params, {}, of, tell)


def finetuned(opened: "Opened", name: str) -> tuple[FinetuningTask, list[str]]:
    """(the task of a run with that name, '' where it has one alone, as it was chosen by --dev; its labels)."""
    tasks = {group_of(one.name): one.objective for one in tasks_of(opened.recipe, opened.recipe.phases[0])}
    if name not in tasks:
        raise UserError(unknown("--task: this run has no", name or "task without a name", tasks))
    task = tasks[name]
    if not isinstance(task, FinetuningTask):
        raise UserError(f"{opened.source}: was not finetuned on a task ({', '.join(TASKS)}); give a run that was")
    begin, end = task.part
    all_labels = getattr(opened.config, "labels", ())  # a model that writes has none
    labels = [label.removeprefix(f"{name}/") for label in all_labels[begin : end or None]]
    return task.chosen(figures_by_dev(opened.source, opened.step, name)), labels


def figures_by_dev(run: Path, step: int, task: str) -> dict[str, float]:
    """Of a run's last evaluation up to a step those of a task, '' where there is one alone."""
    before = [of for of in read_metrics(RunDirectory(run), "eval") if of["step"] <= step]
    place, figures = f"{task}/" if task else "", before[-1].items() if before else ()
    return {name.removeprefix(place): value for name, value in figures if name.startswith(place)}
