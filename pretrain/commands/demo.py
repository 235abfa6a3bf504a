"""`python -m pretrain demo`: prepare the built-in corpus, train an ELECTRA, evaluate, plot, export, fill masks."""

import dataclasses
import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
from rich.console import Console

from models.core.ranges import COUNT
from pretrain.commands.common import import_models, parse_checked

COMMANDS = (
    "data_pipelines prepare --source builtin --tokenizer wordpiece --vocab-size 2048 --out FOLDER/corpus",
    "pretrain run electra-tiny --corpus FOLDER/corpus --workdir FOLDER/run --log-every 100",
    "pretrain eval FOLDER/run",
    "pretrain plot FOLDER/run --out FOLDER/curves.png",
    "pretrain export FOLDER/run --to FOLDER/export",
)


@dataclasses.dataclass(frozen=True)
class Demo:
    """Prepare the built-in corpus, train an ELECTRA on it, evaluate, plot and export it."""

    folder: Path = Path("runs/demo")
    """Folder for all output; a second start resumes there."""
    steps: int | None = None
    """Number of training steps; by default so many that the demo takes a few minutes."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Demo, arguments, "demo", {"steps": COUNT})
    import_models()
    console = Console(highlight=False, soft_wrap=True)
    for command in COMMANDS:
        package, *words = (word.replace("FOLDER", str(options.folder)) for word in command.split())
        if words[0] == "run" and options.steps is not None:
            words += ["--steps", str(options.steps)]
        console.print(f"\n$ python -m {package} {shlex.join(words)}", style="bold", markup=False)
        if status := import_module(f"{package}.__main__").main(words):
            return status
    console.print("\n[bold]Masks in held-out text, filled by the generator[/bold]")
    fill_masks(options.folder / "run", console)
    further = 'to train on your own text: README, "From your text to a model"'
    console.print(f"\nThe model is in {options.folder / 'export'}; {further}")
    return 0


def fill_masks(workdir: Path, console: Console, rows: int = 4, window: int = 12) -> None:
    """Print held-out snippets with one masked token each, the original token and the generator's best guesses."""
    from pretrain.generation.decoding import fill
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.opened import open_model

    opened, (corpus,) = open_model(workdir), RunDirectory(workdir).open_corpora().values()
    written, mask, phase = opened.tokenizer.tokenizer.id_to_token, corpus.special["mask"], opened.recipe.phases[-1]
    examples = opened.objective.examples(corpus, "heldout", phase, seed=1)
    spread = np.linspace(0, examples.number - 1, min(8 * rows, examples.number)).astype(np.int64)
    batch = examples.build(0, spread)
    names = "tokens", "segments", "prediction_positions", "prediction_targets"
    for padded, segments, positions, targets in zip(*(batch[name] for name in names), strict=True):
        pairs = zip(positions.tolist(), map(written, targets.tolist()), strict=True)
        masked = [(at, word) for at, word in pairs if padded[at] == mask and word.isalpha()]
        if not masked or rows == 0:
            continue
        rows -= 1
        (at, word), tokens = masked[len(masked) // 2], padded[segments > 0].tolist()
        guesses = fill(opened.module, opened.params, tokens, mask, phase.length, 5)[tokens[:at].count(mask)]
        near = " ".join(map(written, tokens[max(0, at - window) : at + window]))
        console.print(near.replace(" ##", ""), markup=False)
        best = ", ".join(written(token) for token, _ in guesses)
        console.print(f"    original: {word}   guesses: {best}", markup=False)
