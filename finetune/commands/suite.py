"""`python -m finetune suite`: a model's scores on a folder of tasks, several seeds each, as a table and a picture."""

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
from data_pipelines.errors import UserError
from finetune.task import FinetuningTask
from finetune.task_files import of_task_file, task_files
from finetune.training import Files, Programs, finetune
from models.core.ranges import COUNT
from pretrain.commands.common import check_file, save_picture, writing
from pretrain.commands.platform import keep_compiled_with
from pretrain.options import check_options
from pretrain.storage.best import SCORE
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory, write_whole
from pretrain.training.signals import EXIT_STOPPED, StopRequest, stop_request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Finetune a model on each task of a folder with several seeds; what is finished is not done again."""

    run: Positional[Place]
    """The model: a run's work directory, or a Hugging Face folder."""
    tasks: Path
    """Folder of tasks, NAME.json each: {"task": "classify", "train": "train.tsv", "dev": "dev.tsv", "epochs": 5, ...},
    with paths relative to the file and any options of `finetune run` but the seed."""
    out: Path
    """The table, .md; beside it a picture, .png, and the scores of all seeds, .json."""
    workdir: Path | None = None
    """Where the runs are; by default beside --out."""
    seeds: int = 5
    """Runs of each task."""
    from_scratch: bool = False
    """Begin with random weights: what the model's pretraining is worth."""

    def __post_init__(self):
        check_options(self, {"seeds": COUNT})
        if self.out.suffix != ".md":
            raise UserError(f"--out {self.out}: is a table in Markdown; give a name that ends in .md")


def main(arguments: Sequence[str]) -> int:
    options = parse(Suite, arguments, "python -m finetune suite")
    check_file(options.out)
    given, scores = task_files(options.tasks), {}
    tasks = {name: of_task_file(fields, **_of_run(options, name, 0))[0] for name, fields in given.items()}
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
    with writing(options.out):
        write_whole(options.out.with_suffix(".json"), json.dumps(scores, indent=1) + "\n")
        metrics = {name: metric_of(options, name, task) for name, task in tasks.items()}
        write_whole(options.out, card(options, scores, metrics))
    title = f"{options.run}{' from scratch' * options.from_scratch}"
    picture(scores, metrics, options.out.with_suffix(".png"), title)
    print(options.out.read_text("utf-8"), end="")
    return 0


def workdir(options: Suite, name: str, seed: int) -> Path:
    """Of one run."""
    return (options.workdir or options.out.with_suffix("")) / name / str(seed)


def _of_run(options: Suite, name: str, seed: int) -> dict:
    places = {"from": options.run, "workdir": workdir(options, name, seed)}
    return {**places, "seed": seed, "from_scratch": options.from_scratch}


def score(options: Suite, name: str, fields: Mapping, seed: int, stop: StopRequest, programs: Programs) -> float | None:
    """The best on --dev of one run, which is made or gone on with; None where it was stopped."""
    task, run = of_task_file(fields, **_of_run(options, name, seed))
    keep_compiled_with(run.workdir)
    with contextlib.redirect_stdout(io.StringIO()), quiet():
        if finetune({"": Files(task, run.train, run.dev)}, run, stop, programs):
            return None
    return max(one[SCORE] for one in read_metrics(RunDirectory(run.workdir), "eval"))


@contextlib.contextmanager
def quiet():
    """Without what each run warns of: its log has it."""
    logger, before = logging.getLogger(), logging.getLogger().level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def metric_of(options: Suite, name: str, task: FinetuningTask) -> str:
    """The name of the figure that is the score, as of `with_score`."""
    figures = [*read_metrics(RunDirectory(workdir(options, name, 0)), "eval")[-1]]
    return getattr(task, "metric", "") or figures[figures.index(SCORE) + 1]


def card(options: Suite, scores: Mapping[str, Sequence[float]], metrics: Mapping[str, str]) -> str:
    """The table."""
    begun = "with random weights" if options.from_scratch else "with its weights"
    lines = [
        f"# {options.run}, finetuned {begun}",
        "",
        f"Best scores on --dev over {options.seeds} seeds, in percent; an error as it is.",
        "",
        "| task | score | median | least | most | standard deviation |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_task in scores.items():
        values, form = shown(of_task, metrics[name]), ".3f" if metrics[name] == "error" else ".1f"
        figures = np.median(values), values.min(), values.max(), values.std(ddof=len(values) > 1)
        lines.append(f"| {name} | {metrics[name]} | " + " | ".join(f"{value:{form}}" for value in figures) + " |")
    return "\n".join(lines) + "\n"


def shown(of_task: Sequence[float], metric: str) -> np.ndarray:
    """Scores as a reader sees them, f64[seeds]: in percent, but an error, whose score is below 0, as it is."""
    return -np.array(of_task) if metric == "error" else 100 * np.array(of_task)


def picture(scores: Mapping[str, Sequence[float]], metrics: Mapping[str, str], out: Path, title: str) -> None:
    """Each seed's score of each task, and their median."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 1.2 * len(scores), 4), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, of_task) in enumerate(scores.items()):
        values = shown(of_task, metrics[name])
        seeds = axes.scatter(np.full(len(values), place), values, s=18, color="C0", alpha=0.6)
        median = axes.hlines(np.median(values), place - 0.25, place + 0.25, color="C1")
    names = [f"{name} ({metrics[name]})" for name in scores]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set(ylabel="score on --dev, percent; an error as it is", title=title)
    save_picture(figure, {"a seed": seeds, "median": median}, 2, out)
