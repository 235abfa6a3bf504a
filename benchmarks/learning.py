"""Do they learn? BERT-mini and an ELECTRA of its size on WikiText-2, two seeds each, against token frequencies.

    python -m benchmarks.learning --wikitext2 DIR [--out benchmarks/results/learning]

DIR holds WikiText-2's train.txt and valid.txt (word level). Each article is a document; what is held out is drawn by
document hash. Writes OUT.md (the table) and OUT.png (the curves). Each run has one core to itself, as many run at once
as there are cores; CPU minutes are those of the run's process, all threads.
"""

import dataclasses
import time
from pathlib import Path

import tyro

from benchmarks.wikitext2 import Training, cadence, corpus, train
from pretrain.commands.plot import plot

# Short rows and small batches: in so short a training the number of updates counts most, and with fewer positions the
# position embeddings are learned sooner. No dropout: no text is seen often enough to be learned by heart. A wider start
# than BERT's 0.02, which suits a width of 768: these models are 256 wide. 2 million words do not fill a vocabulary of
# more than a few thousand pieces.
VOCABULARY = 2048
SHARED = (
    *("--phases.0.length", "32", "--phases.0.batch-size", "16", "--objective.layout", "packed-sentences"),
    *("--schedule.peak", "5e-4", "--schedule.warmup", "0.1", "--model.dropout", "0", "--model.attention-dropout", "0"),
    *("--model.init-std", "0.05"),
)
# Whole words for ELECTRA: a generator predicts the pieces of a word one by one, and what does not make a word is the
# first thing that a discriminator learns to find.
RUNS = {
    "electra-mini": ("--objective.masking.whole-word",),
    "bert-mini": ("--objective.no-next-sentence", "--model.no-pair-head", "--objective.masking.rate", "0.2"),
}
SEEDS = (0, 1)


@dataclasses.dataclass(frozen=True)
class Learning:
    """Train each model with each seed and compare with guessing."""

    wikitext2: Path
    """Folder with train.txt and valid.txt."""
    folder: Path = Path("runs/learning")
    """For the corpus and the runs; finished parts are not done again."""
    out: Path = Path("benchmarks/results/learning")
    """Where the table (.md) and the curves (.png) go."""
    steps: int = 4500
    """Of each run."""


def main(options: Learning) -> None:
    folder = options.folder
    prepared = corpus(options.wikitext2, folder, "wordpiece", VOCABULARY)
    given = (*cadence(options.steps), *SHARED)
    runs = [
        Training(recipe, recipe, seed, (*given, *own), folder / f"{recipe}-seed{seed}")
        for recipe, own in RUNS.items()
        for seed in SEEDS
    ]
    minutes = train(runs, prepared)
    rows = [(run.name, run.seed, spent, *_figures(run.workdir)) for run, spent in zip(runs, minutes, strict=True)]
    rows.sort(key=lambda row: row[:2])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text(_table(rows, options))
    print(options.out.with_suffix(".md").read_text())
    print(plot([run.workdir for run in runs], options.out.with_suffix(".png")))


def _figures(workdir: Path) -> tuple[dict, dict]:
    """(the last held-out figures, the baselines)."""
    from pretrain.storage.journal import read_metrics
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.evaluate import Evaluators
    from pretrain.training.restore import restore

    directory = RunDirectory(workdir)
    restored = restore(directory)
    evaluator = Evaluators(restored.stages[0], directory.open_corpora(), 1024)
    return read_metrics(directory, "eval")[-1], evaluator.baselines()


def _table(rows: list, options: Learning) -> str:
    lines = [
        f"# Learning on WikiText-2, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python -m benchmarks.learning --wikitext2 DIR --steps {options.steps}`;",
        f"vocabulary {VOCABULARY:,}; one core a run;",
        f"`{' '.join(SHARED)}`" + "".join(f"; {recipe}: `{' '.join(RUNS[recipe])}`" for recipe in RUNS if RUNS[recipe]),
        "",
        "Held-out figures of whole articles, cross-entropy in nats; CPU minutes count all threads.",
        "",
        "| model | seed | CPU min | masked-token loss (unigram) | accuracy (unigram) "
        "| detection loss (base-rate entropy) | ROC-AUC | average precision (base rate) | F1 (always 'replaced') |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for recipe, seed, minutes, figures, baselines in rows:
        term = "mlm" if "mlm_loss" in figures else "generator"
        cells = [
            recipe, seed, f"{minutes:.1f}",
            f"{figures[f'{term}_loss']:.3f} ({baselines[f'{term}_loss']:.3f})",
            f"{figures[f'{term}_accuracy']:.3f} ({baselines[f'{term}_accuracy']:.3f})",
        ]  # fmt: skip
        if "roc_auc" in figures:
            cells += [
                f"{figures['discriminator_loss']:.4f} ({figures['base_rate_entropy']:.4f})",
                f"{figures['roc_auc']:.3f}",
                f"{figures['average_precision']:.3f} ({figures['base_rate']:.3f})",
                f"{figures['f1']:.3f} ({figures['always_f1']:.3f})",
            ]
        lines.append("| " + " | ".join(map(str, cells + [""] * (9 - len(cells)))) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Learning))
