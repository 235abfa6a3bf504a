"""`python -m finetune suite`: scores a model on a folder of tasks over several seeds, as a table and a plot."""

import contextlib
import dataclasses
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional

from data_pipelines.command_line import Place, parse
from data_pipelines.durable import writing
from data_pipelines.errors import UserError
from finetune.options import Run
from finetune.task import FinetuningTask
from finetune.task_files import of_task_file, task_files
from finetune.training import Files, Programs, finetune
from models.core.ranges import COUNT
from pretrain.commands.common import check_file, save_picture
from pretrain.commands.platform import keep_compiled_with
from pretrain.options import check_options
from pretrain.storage.best import SCORE
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory, write_whole
from pretrain.training.signals import EXIT_STOPPED, StopRequest, stop_request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Finetune a model on each task of a folder with several seeds. Finished runs are not repeated."""

    run: Positional[Place]
    """The model: a run's work directory, or a Hugging Face folder."""
    tasks: Path
    """Folder with a NAME.json for each task: {"task": "classify", "train": "train.tsv", "dev": "dev.tsv", "epochs": 5},
    with paths relative to the file and any options of `finetune run` except the seed."""
    out: Path
    """Markdown table to write (.md); a plot (.png) and the scores of all seeds (.json) go beside it."""
    workdir: Path | None = None
    """Directory for the runs; by default beside --out."""
    seeds: int = 5
    """Number of runs, each with its own random seed, for each task."""
    from_scratch: bool = False
    """Start from random weights: shows what the model's pretraining is worth."""

    def __post_init__(self):
        check_options(self, {"seeds": COUNT})
        if self.out.suffix != ".md":
            raise UserError(f"--out {self.out}: is a Markdown table; give a name that ends in .md")


def main(arguments: Sequence[str]) -> int:
    options = parse(Suite, arguments, "python -m finetune suite")
    check_file(options.out)
    given, scores = task_files(options.tasks), {}
    tasks = {name: of_task_file(fields, **_of_run(options, name, 0)) for name, fields in given.items()}
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with stop_request() as stop, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("", total=len(tasks) * options.seeds)
        for name, fields in given.items():
            programs = Programs()
            for seed in range(options.seeds):
                bar.update(shown, description=f"{name}, seed {seed}")
                found = score(options, name, fields, seed, stop, programs)
                if found is None:
                    return EXIT_STOPPED
                scores.setdefault(name, []).append(found)
                bar.advance(shown)
                console.print(f"{name}, seed {seed}: {found:.4f}", highlight=False)
    with writing(options.out):
        write_whole(options.out.with_suffix(".json"), json.dumps(scores, indent=1) + "\n")
        metrics = {name: metric_of(options, name, task) for name, (task, _) in tasks.items()}
        kinds = {name: kind_of(given[name], run) for name, (_, run) in tasks.items()}
        write_whole(options.out, card(options, scores, metrics, kinds))
    title = f"{options.run.name}, finetuned from {'random' if options.from_scratch else 'pretrained'} weights"
    picture(scores, metrics, options.out.with_suffix(".png"), title)
    print(options.out.read_text("utf-8"), end="")
    return 0


def workdir(options: Suite, name: str, seed: int) -> Path:
    """Return the work directory of one run."""
    return (options.workdir or options.out.with_suffix("")) / name / str(seed)


def _of_run(options: Suite, name: str, seed: int) -> dict:
    places = {"from": options.run, "workdir": workdir(options, name, seed)}
    return {**places, "seed": seed, "from_scratch": options.from_scratch}


def score(options: Suite, name: str, fields: Mapping, seed: int, stop: StopRequest, programs: Programs) -> float | None:
    """Start or resume one run and return its best score on --dev; None if it was stopped."""
    task, run = of_task_file(fields, **_of_run(options, name, seed))
    keep_compiled_with(run.workdir)
    logger, level = logging.getLogger(), logging.getLogger().level
    logger.setLevel(logging.ERROR)  # a run's warnings are in its log
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            status = finetune({"": Files(task, run.train, run.dev)}, run, stop, programs)
    finally:
        logger.setLevel(level)
    return None if status else max(one[SCORE] for one in read_metrics(RunDirectory(run.workdir), "eval"))


def metric_of(options: Suite, name: str, task: FinetuningTask) -> str:
    """Return the name of the metric that `with_score` took as the score."""
    figures = [*read_metrics(RunDirectory(workdir(options, name, 0)), "eval")[-1]]
    return getattr(task, "metric", "") or figures[figures.index(SCORE) + 1]


def kind_of(fields: Mapping, run: Run) -> tuple[str, str]:
    """Return what a task is, and how it is trained, for the card."""
    examples = f"{run.examples:,} examples" if run.examples else "all examples"
    return str(fields["task"]), f"{examples}, {run.epochs:g} epochs, learning rate {run.peak:g}"


def card(
    options: Suite,
    scores: Mapping[str, Sequence[float]],
    metrics: Mapping[str, str],
    kinds: Mapping[str, tuple[str, str]],
) -> str:
    """Return the table in Markdown.   kinds: as `kind_of` returns them."""
    start = "random" if options.from_scratch else "pretrained"
    lines = [
        f"# {options.run.name}, finetuned from {start} weights",
        "",
        f"Scores on the development set over {options.seeds} seeds, each of its best evaluation; in percent, except "
        "mean squared errors.",
        "",
        "| task | kind | training | metric | median | minimum | maximum | standard deviation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, of_task in scores.items():
        values, form = shown(of_task, metrics[name]), ".3f" if metrics[name] == "error" else ".1f"
        figures = [f"{value:{form}}" for value in (np.median(values), values.min(), values.max())]
        figures.append(f"{values.std(ddof=1):{form}}" if len(values) > 1 else "")
        lines.append("| " + " | ".join([name, *kinds[name], metrics[name], *figures]) + " |")
    return "\n".join(lines) + "\n"


def shown(of_task: Sequence[float], metric: str) -> np.ndarray:
    """Return scores to show, f64[seeds]: percentages, or for `error` the mean squared errors without their minus."""
    return -np.array(of_task) if metric == "error" else 100 * np.array(of_task)


def picture(scores: Mapping[str, Sequence[float]], metrics: Mapping[str, str], out: Path, title: str) -> None:
    """Plot the score of each seed and their median for each task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 1.2 * len(scores), 4), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, of_task) in enumerate(scores.items()):
        values = shown(of_task, metrics[name])
        seeds = axes.scatter(np.full(len(values), place), values, s=18, color="C0", alpha=0.6)
        median = axes.hlines(np.median(values), place - 0.25, place + 0.25, color="C1")
    names = [f"{name} ({metrics[name]})" for name in scores]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set(ylabel="score on the development set, in percent", title=title)
    save_picture(figure, {"one seed": seeds, "median": median}, 2, out)
