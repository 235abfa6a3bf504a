"""Does GPT-2 learn more than counting finds? On WikiText-2, beside a Kneser-Ney trigram on the same tokens.

    python -m benchmarks.decoder_learning --wikitext2 DIR [--mini-steps 11000] [--seeds 0 1]

Held-out articles are read whole in rows of 256, a row's first tokens without what stands before it. Everything else
as in `benchmarks.memory_learning`.
"""

import dataclasses
import math
import time
from pathlib import Path

import tyro

from benchmarks import kneser_ney
from benchmarks.wikitext2 import Training, corpus, heldout_bytes, train
from data_pipelines.corpus import Corpus
from pretrain.commands.plot import plot
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.evaluate import Evaluators
from pretrain.training.restore import restore

# Many small updates, no dropout (the text is seen less than three times), a wider start than large models', and a
# second moment that remembers longer where batches are small. A rate that stays lets a run be made longer.
SHARED = (
    *("--phases.0.length", "256", "--phases.0.batch-size", "4", "--optimizer.b2", "0.99"),
    *("--model.dropout", "0", "--model.attention-dropout", "0", "--model.init-std", "0.05"),
    *("--schedule.name", "warmup-stable-decay", "--schedule.peak", "1e-3"),
    *("--schedule.warmup", "0.05", "--schedule.decay", "0.3"),
)
CADENCE = ("--eval-every", "1500", "--log-every", "50", "--checkpoint-every", "500")


@dataclasses.dataclass(frozen=True)
class Options:
    """Train each model with each seed and compare with counting."""

    wikitext2: Path
    """Folder with train.txt and valid.txt."""
    folder: Path = Path("runs/decoder_learning")
    """For the corpus and the runs; finished parts are not done again."""
    out: Path = Path("benchmarks/results/decoder_learning")
    """Where the table (.md) and the curves (.png) go."""
    seeds: tuple[int, ...] = (0, 1)
    tiny_steps: int = 8000
    """0 leaves the model out."""
    mini_steps: int = 11000
    """0 leaves the model out."""


def main(options: Options) -> None:
    folder = options.folder
    path = corpus(options.wikitext2, folder, "sentencepiece-unigram", kneser_ney.VOCABULARY)
    steps = {"gpt2-tiny": options.tiny_steps, "gpt2-mini": options.mini_steps}
    runs = [
        Training(name, name, seed, ("--steps", str(number), *CADENCE, *SHARED), folder / f"{name}-seed{seed}")
        for name, number in steps.items()
        for seed in options.seeds
        if number
    ]
    minutes = train(runs, path)
    prepared = Corpus(path)
    counted = {order: kneser_ney.held_out_loss(prepared, order) for order in range(1, kneser_ney.ORDER + 1)}
    trigram, tokens = counted[kneser_ney.ORDER]
    bits = tokens / heldout_bytes(prepared, folder) / math.log(2)  # a byte, for each nat a token
    row = lambda name, seed, spent, loss: (
        f"| {name} | {seed} | {spent} | {loss:.3f} | {math.exp(loss):.1f} | {loss * bits:.3f} | {trigram - loss:+.3f} |"
    )
    lines = [row(f"Kneser-Ney, order {order}", "", "", loss) for order, (loss, _) in counted.items()]
    for run, spent in zip(runs, minutes, strict=True):
        lines.append(row(f"{run.name}, {steps[run.name]:,} steps", run.seed, f"{spent:.1f}", _loss(run.workdir)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text("\n".join([*_head(tokens), *lines]) + "\n")
    print(options.out.with_suffix(".md").read_text())
    if runs:
        print(plot([run.workdir for run in runs], options.out.with_suffix(".png")))


def _loss(workdir: Path) -> float:
    """Of all held-out rows, in nats a token."""
    directory = RunDirectory(workdir)
    restored = restore(directory)
    evaluator = Evaluators(restored.stages[0], directory.open_corpora(), 1024)
    return evaluator(restored.params, restored.frozen, restored.step)["lm_loss"]


def _head(tokens: int) -> list[str]:
    return [
        f"# GPT-2 and counting on WikiText-2, {time.strftime('%Y-%m-%d')}",
        "",
        "`python -m benchmarks.decoder_learning --wikitext2 DIR`; sentencepiece-unigram with",
        f"{kneser_ney.VOCABULARY:,} pieces; one core a run; `{' '.join(SHARED)}`",
        "",
        f"Held-out cross-entropy of whole articles, {tokens:,} tokens with those that end them; CPU minutes count all",
        "threads.",
        "",
        "| model | seed | CPU min | nats a token | perplexity | bits per byte | nats below the trigram |",
        "|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    main(tyro.cli(Options))
