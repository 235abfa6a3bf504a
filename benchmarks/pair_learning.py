"""Does a model learn which of two runs of text comes first, and which belong together? On WikiText-2, two seeds each.

    python -m benchmarks.pair_learning --wikitext2 DIR [--out benchmarks/results/pair_learning]

Sentence-order prediction (Lan et al. 2020) beside next-sentence prediction (Devlin et al. 2019), otherwise alike, on
held-out pairs. A guess reaches 50%; the table says by how many standard errors a run is above it, and what the lengths
of the two segments alone would reach: of two runs of whole sentences the last overshoots. Everything else as in
`benchmarks.learning`.
"""

import dataclasses
import math
import time
from pathlib import Path

import numpy as np
import tyro

from benchmarks.wikitext2 import Training, cadence, corpus, train
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.evaluate import Evaluators
from pretrain.training.restore import restore

VOCABULARY, LENGTH = 2048, 64
SHARED = (
    *("--phases.0.length", str(LENGTH), "--phases.0.batch-size", "32", "--optimizer.name", "adamw"),
    *("--schedule.peak", "5e-4", "--schedule.warmup", "0.1", "--model.dropout", "0", "--model.attention-dropout", "0"),
    *("--model.init-std", "0.05"),
)
ORDER = ("--objective.no-next-sentence", "--objective.sentence-order")
TASKS = {"sentence order": ("sentence_order", ORDER), "next sentence": ("next_sentence", ())}
SEEDS = (0, 1)
ROWS = 8192  # held out, or all that there are


@dataclasses.dataclass(frozen=True)
class Options:
    """Train on each task with each seed."""

    wikitext2: Path
    """Folder with train.txt and valid.txt."""
    folder: Path = Path("runs/pair_learning")
    """For the corpus and the runs; finished parts are not done again."""
    out: Path = Path("benchmarks/results/pair_learning")
    """Where the table (.md) goes."""
    recipe: str = "bert-tiny"
    """What is trained."""
    steps: int = 4500
    """Of each run."""


def main(options: Options) -> None:
    prepared = corpus(options.wikitext2, options.folder, "wordpiece", VOCABULARY)
    given = (*cadence(options.steps), *SHARED)
    runs = [
        Training(task, options.recipe, seed, (*given, *own), options.folder / f"{task.replace(' ', '-')}-seed{seed}")
        for task, (_, own) in TASKS.items()
        for seed in SEEDS
    ]
    minutes = train(runs, prepared)
    lines = [_line(run, spent) for run, spent in zip(runs, minutes, strict=True)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text("\n".join([*_head(options), *lines]) + "\n")
    print(options.out.with_suffix(".md").read_text())


def _line(run: Training, minutes: float) -> str:
    """One row of the table."""
    directory, term = RunDirectory(run.workdir), TASKS[run.name][0]
    restored = restore(directory)
    evaluator = Evaluators(restored.stages[0], directory.open_corpora(), ROWS)
    figures = evaluator(restored.params, restored.frozen, restored.step)
    pairs, accuracy = sum((batch[term] >= 0).sum() for batch in evaluator.batches()), figures[f"{term}_accuracy"]
    above = lambda chance: f"{(accuracy - chance) / math.sqrt(chance * (1 - chance) / pairs):.1f}"
    lengths = by_lengths(evaluator.batches(), term)
    found = f"{accuracy:.1%}", above(0.5), f"{lengths:.1%}", above(lengths), f"{figures['mlm_loss']:.3f}"
    cells = [run.name, run.seed, f"{minutes:.1f}", pairs, *found]
    return "| " + " | ".join(map(str, cells)) + " |"


def by_lengths(batches: list[dict[str, np.ndarray]], term: str) -> float:
    """Accuracy of the better of two guesses: the longer segment is the first, or the second."""
    right = total = 0.0
    for batch in batches:
        second = (batch["types"] > 0).sum(axis=1) - 1  # and its [SEP]
        first = batch["segments"].sum(axis=1) - second - 3
        labelled = batch[term] >= 0
        guess = np.where(first == second, 0.5, first < second)  # an even guess where they are equally long
        right += np.abs(guess - (1 - batch[term]))[labelled].sum()
        total += labelled.sum()
    return max(right, total - right) / total


def _head(options: Options) -> list[str]:
    return [
        f"# Learning of pairs on WikiText-2, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python -m benchmarks.pair_learning --wikitext2 DIR --recipe {options.recipe} --steps {options.steps}`;",
        f"wordpiece with {VOCABULARY:,} pieces; one core a run; `{' '.join(SHARED)}`",
        "",
        "Accuracy on held-out pairs, by how many standard errors it is above 50% and above what lengths reach.",
        "",
        "| task | seed | CPU min | held-out pairs | accuracy | above 50% | by lengths | above that | mlm loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    main(tyro.cli(Options))
