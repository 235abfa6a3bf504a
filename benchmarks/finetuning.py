"""What is a pretraining worth on tasks? Models of one size, pretrained with equal FLOPs, finetuned beside the same
models with random weights; or finished runs beside the first of them.

    python -m benchmarks.finetuning --corpus DIR --tasks DIR [--models bert-tiny gpt2-tiny] [--steps 5000]
    python -m benchmarks.finetuning --runs ALONE TAUGHT --tasks DIR

--corpus is what `python -m data_pipelines prepare` makes, --tasks what `python -m finetune suite` takes. --steps are
those of the first model; the others have as many as cost the same. A pretraining has one core, and so have the
finetunings of a model; as many run at once as there are cores. Differences are paired by seed, with the 95% interval of
Student's t.
"""

import dataclasses
import json
import os
import queue
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.wikitext2 import Training, cadence, train
from data_pipelines.command_line import end_with, parse
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from pretrain.commands.platform import prepare

SHARED = "--model.dropout 0 --model.attention-dropout 0 --model.init-std 0.05 --phases.0.length 128"
SHARED += " --phases.0.batch-size 32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Finetune pretrained models, each compared with the same with random weights; or runs, with the first."""

    tasks: Path
    """Folder of tasks, as of `python -m finetune suite`."""
    corpus: Path | None = None
    """What models are pretrained on, with a WordPiece vocabulary."""
    runs: tuple[Path, ...] = ()
    """Finished runs to finetune, in place of pretraining models."""
    models: tuple[str, ...] = ("bert-tiny", "electra-tiny", "gpt2-tiny")
    """Recipes, or files of recipes (.json)."""
    steps: int = 5000
    """Of the pretraining of the first."""
    peak: float = 1e-3
    """The highest learning rate of pretraining."""
    seeds: int = 5
    """Runs of each task."""
    workdir: Path = Path("runs/finetuning")
    """Where all runs are; finished ones are not made again."""
    out: Path | None = None
    """File for the table; by default it is printed."""

    def __post_init__(self):
        if (self.corpus is None) == (not self.runs):
            raise UserError("--corpus, --runs: give one of them")
        if len({run.name for run in self.runs}) < len(self.runs):
            raise UserError("--runs: the names of their folders must differ; rename one")


def main(arguments: list[str]) -> int:
    options = parse(Comparison, arguments, "python -m benchmarks.finetuning")
    if options.runs:
        jobs = {run.name: (run, False) for run in options.runs}
        beside = dict.fromkeys([*jobs][1:], options.runs[0].name)
    else:
        trainings = pretrainings(options)
        for training, minutes in zip(trainings, train(trainings), strict=True):
            print(f"{training.name}: {minutes:.0f} CPU minutes")
        jobs = {training.name: (training.workdir, False) for training in trainings}
        jobs |= {f"{training.name}, random": (training.workdir, True) for training in trainings}
        beside = {training.name: f"{training.name}, random" for training in trainings}
    cores = sorted(os.sched_getaffinity(0))
    free = queue.Queue()
    for core in cores:
        free.put(core)
    with ThreadPoolExecutor(len(cores)) as pool:
        scores = pool.map(lambda job: suite(*job, options, free), jobs.values())
        cards = dict(zip(jobs, scores, strict=True))
    table = "\n".join(table_of(cards, beside, options)) + "\n"
    print(table) if options.out is None else options.out.write_text(table)
    return 0


def pretrainings(options: Comparison) -> list[Training]:
    """One of each model, of equal FLOPs."""
    from pretrain.commands.run import parse_run
    from pretrain.recipe import resolve
    from pretrain.training.step import model_flops

    flops, made = {}, []
    settings = (*SHARED.split(), "--schedule.peak", str(options.peak))
    for name in options.models:
        places = ["--corpus", str(options.corpus), "--workdir", "unused"]
        named = ["--recipe", name] if name.endswith(".json") else [name]
        recipe = resolve(parse_run([*named, *places, *settings])[0], Corpus(options.corpus))
        flops[name] = model_flops(recipe, recipe.phases[0])
        steps = round(options.steps * flops[options.models[0]] / flops[name])
        workdir = options.workdir / f"{Path(name).stem}-{steps}"
        made.append(Training(name, name, 0, (*settings, *cadence(steps)), workdir, str(options.corpus)))
    return made


def suite(run: Path, random: bool, options: Comparison, free: queue.Queue) -> dict[str, list[float]]:
    """The score of each seed, by task, computed on a free core."""
    folder = options.workdir / f"{run.name}{'-random' if random else ''}-tasks"
    command = ["finetune", "suite", run, "--tasks", options.tasks, "--seeds", options.seeds]
    command += ["--out", folder / "card.md", *["--from-scratch"] * random]
    core = free.get()
    on_core = lambda: os.sched_setaffinity(0, {core})
    try:
        subprocess.run([sys.executable, "-m", *map(str, command)], check=True, preexec_fn=on_core)
    finally:
        free.put(core)
    return json.loads((folder / "card.json").read_text())


def table_of(cards: Mapping[str, Mapping[str, list[float]]], beside: Mapping[str, str], options: Comparison):
    """Yield the lines of the table.   beside: what a model is compared with."""
    tasks = [*next(iter(cards.values()))]
    yield f"Mean score of {options.seeds} seeds, in brackets the paired difference from another, with its 95% interval."
    yield ""
    yield "| model | compared with | " + " | ".join(tasks) + " |"
    yield "|---" * (2 + len(tasks)) + "|"
    for name, card in cards.items():
        other = beside.get(name, "")
        cells = [cell(card[task], cards[other][task] if other else None) for task in tasks]
        yield f"| {name} | {other} | " + " | ".join(cells) + " |"


def cell(scores: list[float], others: list[float] | None) -> str:
    """In percent."""
    mean = f"{100 * np.mean(scores):.1f}"
    if others is None:
        return mean
    difference = 100 * np.subtract(scores, others)
    half = stats.t.ppf(0.975, len(difference) - 1) * difference.std(ddof=1) / len(difference) ** 0.5
    return f"{mean} ({difference.mean():+.1f} ± {half:.1f})"


if __name__ == "__main__":
    prepare()
    end_with(main)
