"""Does memory help, and does XLNet learn? On WikiText-2, two seeds each, against token frequencies.

    python -m benchmarks.memory_learning --wikitext2 DIR [--out benchmarks/results/memory_learning]

Transformer-XL is trained with memory and without, otherwise alike, and evaluated on the same held-out text cut into
rows of 1, 2 and 4 times its training length: with a memory of that length, and without one. XLNet predicts held-out
text in random orders. Everything else as in `benchmarks.learning`.
"""

import dataclasses
import time
from pathlib import Path

import tyro

from benchmarks.wikitext2 import Training, cadence, corpus, train
from pretrain.commands.plot import plot
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.evaluate import Evaluators
from pretrain.training.placement import stages
from pretrain.training.restore import restore

VOCABULARY, LENGTH = 2048, 32
# As in `benchmarks.learning`: many small updates, no dropout, a wider start than large models'.
SHARED = ("--model.dropout", "0", "--model.attention-dropout", "0", "--model.init-std", "0.05")
STREAM = ("--phases.0.length", str(LENGTH), "--phases.0.batch-size", "16")
RUNS = {  # name -> (recipe, options)
    "transformer-xl with memory": ("transformer-xl-tiny", (*STREAM, "--model.memory", str(LENGTH))),
    "transformer-xl without": ("transformer-xl-tiny", (*STREAM, "--model.memory", "0")),
    "xlnet": ("xlnet-tiny", ()),
}
SEEDS = (0, 1)
MULTIPLES = (1, 2, 4)
ROWS = 1024  # of training length, held out


@dataclasses.dataclass(frozen=True)
class Options:
    """Train each model with each seed and compare with guessing."""

    wikitext2: Path
    """Folder with train.txt and valid.txt."""
    folder: Path = Path("runs/memory_learning")
    """For the corpus and the runs; finished parts are not done again."""
    out: Path = Path("benchmarks/results/memory_learning")
    """Where the table (.md) and the curves (.png) go."""
    steps: int = 4500
    """Of each run."""


def main(options: Options) -> None:
    prepared = corpus(options.wikitext2, options.folder, "sentencepiece-unigram", VOCABULARY)
    given = (*cadence(options.steps), *SHARED)
    runs = [
        Training(name, recipe, seed, (*given, *own), options.folder / f"{name.replace(' ', '-')}-seed{seed}")
        for name, (recipe, own) in RUNS.items()
        for seed in SEEDS
    ]
    minutes = train(runs, prepared)
    lines = [_line(run, spent) for run, spent in zip(runs, minutes, strict=True)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text("\n".join([*_head(options), *lines]) + "\n")
    print(options.out.with_suffix(".md").read_text())
    print(plot([run.workdir for run in runs], options.out.with_suffix(".png")))


def _line(run: Training, minutes: float) -> str:
    """One row of the table."""
    restored, held_out = restore(RunDirectory(run.workdir)), RunDirectory(run.workdir).open_corpora()
    figures = lambda assembly, rows: (
        (evaluator := Evaluators(stages(assembly, restored.mesh)[0], held_out, rows))(
            restored.params, restored.frozen, restored.step
        )
        | {"unigram": evaluator.baselines()}
    )
    if run.recipe.startswith("xlnet"):
        found = figures(restored.assembly, ROWS)
        cells = ["", "", "", f"{found['plm_loss']:.3f}", f"{found['unigram']['plm_loss']:.3f}"]
    else:
        found = [figures(_at_length(restored.assembly, factor), ROWS // factor) for factor in MULTIPLES]
        cells = [*(f"{one['lm_loss']:.3f}" for one in found), "", f"{found[0]['unigram']['lm_loss']:.3f}"]
    return "| " + " | ".join([run.name, str(run.seed), f"{minutes:.1f}", *cells]) + " |"


def _at_length(assembly, factor: int):
    """The model on rows `factor` times as long, with a memory as long as they where it has one."""
    recipe, length = assembly.recipe, LENGTH * factor
    memory = length if recipe.model.memory else 0
    recipe = dataclasses.replace(
        recipe,
        phases=(dataclasses.replace(recipe.phases[0], length=length),),
        objective=dataclasses.replace(recipe.objective, evaluation_memory=memory),
    )
    return assembly._replace(recipe=recipe)


def _head(options: Options) -> list[str]:
    return [
        f"# Learning with memory on WikiText-2, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python -m benchmarks.memory_learning --wikitext2 DIR --steps {options.steps}`; sentencepiece-unigram with",
        f"{VOCABULARY:,} pieces; one core a run; `{' '.join(SHARED)}`"
        + "".join(f"; {name}: `{' '.join((recipe, *own))}`" for name, (recipe, own) in RUNS.items()),
        "",
        "Held-out cross-entropy in nats of whole articles, Transformer-XL's on rows of 1, 2 and 4 times the training",
        f"length of {LENGTH} (with a memory of that length, or none); CPU minutes count all threads.",
        "",
        "| model | seed | CPU min | 1x | 2x | 4x | permutation loss | unigram |",
        "|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    main(tyro.cli(Options))
