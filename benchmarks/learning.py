"""Do they learn? BERT-mini and an ELECTRA of its size on WikiText-2, two seeds each, against token frequencies.

    python -m benchmarks.learning --wikitext2 DIR [--out benchmarks/results/learning]

DIR holds WikiText-2's train.txt and valid.txt (word level). Each article is a document; what is held out is drawn by
document hash. Writes OUT.md (the table) and OUT.png (the curves). CPU time counts all threads of a run's process.
"""

import dataclasses
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import tyro

from pretrain.plot import plot

SHARED = ("--phases.0.length", "64", "--phases.0.batch-size", "16", "--objective.layout", "packed-sentences")
RUNS = {
    "bert-mini": ("--objective.no-next-sentence", "--model.no-pair-head"),
    "electra-mini": (),
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
    steps: int = 4000
    """Of each run."""


def main(options: Learning) -> None:
    corpus = options.folder / "corpus"
    _call("data_pipelines", "prepare", "--source", f"jsonl:{_articles(options)}", "--tokenizer", "wordpiece",
          "--vocab-size", "8192", "--heldout", "0.03", "--out", str(corpus))  # fmt: skip
    rows, workdirs = [], []
    for recipe, settings in RUNS.items():
        for seed in SEEDS:
            workdir = options.folder / f"{recipe}-seed{seed}"
            minutes = _train(options, recipe, seed, corpus, workdir, settings)
            rows.append((recipe, seed, minutes, *_figures(workdir)))
            workdirs.append(workdir)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text(_table(rows, options))
    print(options.out.with_suffix(".md").read_text())
    print(plot(workdirs, options.out.with_suffix(".png")))


def _articles(options: Learning) -> Path:
    """WikiText-2 as JSON lines, one article each."""
    text = "".join((options.wikitext2 / f"{split}.txt").read_text() for split in ("train", "valid"))
    articles = re.split(r"\n \n (?== [^=\n]+ = \n)", text)
    path = options.folder / "articles.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": article}) + "\n" for article in articles if article.strip()))
    return path


def _train(options: Learning, recipe: str, seed: int, corpus: Path, workdir: Path, settings) -> float:
    """Train -> CPU minutes, kept beside the run."""
    spent = workdir / "cpu_minutes.txt"
    if not spent.is_file():
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        _call("pretrain", "run", recipe, "--corpus", str(corpus), "--workdir", str(workdir),
              "--steps", str(options.steps), "--seed", str(seed), "--eval-every", str(max(1, options.steps // 8)),
              "--log-every", "50", *SHARED, *settings)  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{workdir}: {seconds / 60:.1f} CPU minutes, {(time.time() - start) / 60:.1f} minutes")
        spent.write_text(f"{seconds / 60}\n")
    return float(spent.read_text())


def _figures(workdir: Path) -> tuple[dict, dict]:
    """(the last held-out figures, the baselines)."""
    from pretrain.evaluate import Evaluator
    from pretrain.journal import read_metrics
    from pretrain.restore import restore
    from pretrain.run_directory import RunDirectory

    directory = RunDirectory(workdir)
    restored = restore(directory)
    evaluator = Evaluator(restored.assembly, directory.open_corpus(), 0, 1024, restored.mesh)
    return read_metrics(directory, "eval")[-1], evaluator.baselines()


def _table(rows: list, options: Learning) -> str:
    lines = [
        f"# Learning on WikiText-2, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python -m benchmarks.learning --wikitext2 DIR --steps {options.steps}`: {' '.join(SHARED)}; vocabulary 8,192.",
        "Held-out figures of whole articles, cross-entropy in nats; CPU minutes count all threads.",
        "",
        "| model | seed | CPU min | masked-token loss (unigram) | accuracy (unigram) | detection loss (base-rate entropy) "
        "| ROC-AUC | average precision (base rate) | F1 (always 'replaced') |",
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


def _call(*command: str) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True)


if __name__ == "__main__":
    main(tyro.cli(Learning))
