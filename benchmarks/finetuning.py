"""What is a pretraining worth on tasks? Models of one size, pretrained with equal FLOPs, finetuned beside the same
models with random weights.

    python -m benchmarks.finetuning --corpus DIR --tasks DIR [--models bert-tiny gpt2-tiny] [--steps 5000]

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
from pretrain.commands.platform import prepare

SHARED = "--model.dropout 0 --model.attention-dropout 0 --model.init-std 0.05 --phases.0.length 128"
SHARED += " --phases.0.batch-size 32"
RANDOM = "random"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Finetune pretrained models, and the same with random weights, on tasks."""

    corpus: Path
    """What models are pretrained on, with a WordPiece vocabulary."""
    tasks: Path
    """Folder of tasks, as of `python -m finetune suite`."""
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


def main(arguments: list[str]) -> int:
    options = parse(Comparison, arguments, "python -m benchmarks.finetuning")
    trainings = pretrainings(options)
    minutes = dict(zip(options.models, train(trainings), strict=True))
    cores = sorted(os.sched_getaffinity(0))
    free = queue.Queue()
    for core in cores:
        free.put(core)
    jobs = [(training, begin) for begin in ("", RANDOM) for training in trainings]
    with ThreadPoolExecutor(len(cores)) as pool:
        scores = pool.map(lambda job: suite(job[0].workdir, options, job[1] == RANDOM, free), jobs)
        cards = {f"{training.name} {begin}".strip(): of for (training, begin), of in zip(jobs, scores, strict=True)}
    table = "\n".join(table_of(cards, minutes, options)) + "\n"
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


def suite(run: Path, options: Comparison, random: bool, free: queue.Queue) -> dict[str, list[float]]:
    """The score of each seed, by task, computed on a free core."""
    folder = options.workdir / f"{run.name}{'-random' if random else ''}-tasks"
    command = ["finetune", "suite", run, "--tasks", options.tasks, "--seeds", options.seeds]
    command += ["--out", folder / "card.md", *["--from-scratch"] * random]
    core = free.get()
    on_core = lambda: os.sched_setaffinity(0, {core})
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True, preexec_fn=on_core)
    free.put(core)
    return json.loads((folder / "card.json").read_text())


def table_of(cards: Mapping[str, Mapping[str, list[float]]], minutes: Mapping[str, float], options: Comparison):
    """Yield the lines of the table."""
    tasks = [*next(iter(cards.values()))]
    yield f"Mean score over {options.seeds} seeds, in brackets what pretraining adds, paired, with its 95% interval."
    yield ""
    yield "| model | CPU minutes | " + " | ".join(tasks) + " |"
    yield "|---" * (2 + len(tasks)) + "|"
    for name in options.models:
        cells = [cell(cards[name][task], cards[f"{name} {RANDOM}"][task]) for task in tasks]
        yield f"| {name} | {minutes[name]:.0f} | " + " | ".join(cells) + " |"


def cell(pretrained: list[float], random: list[float]) -> str:
    """In percent."""
    difference = 100 * np.subtract(pretrained, random)
    half = stats.t.ppf(0.975, len(difference) - 1) * difference.std(ddof=1) / len(difference) ** 0.5
    return f"{100 * np.mean(pretrained):.1f} ({difference.mean():+.1f} ± {half:.1f})"


if __name__ == "__main__":
    prepare()
    end_with(main)
