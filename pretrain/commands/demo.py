"""`python -m pretrain demo`: prepare the built-in corpus, train an ELECTRA, evaluate, plot, export, fill masks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from models.core.ranges import COUNT
from pretrain.commands.common import import_models, parse_checked
from pretrain.commands.eval import Eval, evaluate
from pretrain.commands.export import export_model
from pretrain.commands.plot import plot
from pretrain.options import Options


@dataclasses.dataclass(frozen=True)
class Demo:
    """Prepare the built-in corpus, train an ELECTRA on it, evaluate, plot and export it."""

    folder: Path = Path("runs/demo")
    """Where everything goes; a second start goes on there."""
    steps: int | None = None
    """Train for fewer or more steps than the few minutes that the demo is meant to take."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Demo, arguments, "demo", {"steps": COUNT})
    import_models()
    return demo(options.folder, options.steps)


def demo(folder: Path, steps: int | None) -> int:
    """Everything below `folder`; a second call goes on where the first stopped -> exit status."""
    from data_pipelines.prepare.command import prepare
    from data_pipelines.prepare.options import Prepare
    from pretrain.recipes.registry import find
    from pretrain.training.run import run
    from pretrain.training.signals import stop_request

    console = Console(highlight=False, soft_wrap=True)
    corpus, workdir = folder / "corpus", folder / "run"

    def step(command: str) -> None:
        console.print(f"\n[bold]$ python -m {command}[/bold]")

    step(f"data_pipelines prepare --source builtin --tokenizer wordpiece --vocab-size 2048 --out {corpus}")
    prepare(Prepare(source=("builtin",), tokenizer="wordpiece", vocab_size=2048, out=corpus), console)

    recipe = find("electra-tiny")
    recipe = dataclasses.replace(recipe, steps=recipe.steps if steps is None else steps)
    step(f"pretrain run {recipe.name} --corpus {corpus} --workdir {workdir} --steps {recipe.steps}")
    options = Options(corpus=str(corpus), workdir=workdir, log_every=100, eval_every=500, checkpoint_every=500)
    with stop_request() as stop:
        status = run(recipe, options, stop)
    if status:
        return status

    step(f"pretrain eval {workdir}")
    evaluate(Eval(workdir))
    step(f"pretrain plot {workdir} --out {folder / 'curves.png'}")
    console.print(plot([workdir], folder / "curves.png"))
    step(f"pretrain export {workdir} --to {folder / 'export'}")
    for exported in export_model(workdir, folder / "export"):
        console.print(exported)
    console.print("\n[bold]Masks that the generator fills in held-out text[/bold]")
    fill_masks(workdir, console)
    further = 'to train on your own text: README, "From your text to a model"'
    console.print(f"\nThe model is in {folder / 'export'}; {further}")
    return 0


def fill_masks(workdir: Path, console: Console, rows: int = 4, window: int = 12) -> None:
    """Print held-out snippets with one masked token each, what stood there and the generator's best guesses."""
    from pretrain.generation.fillings import fill
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
        console.print(f"    was: {word}   guesses: {', '.join(written(token) for token, _ in guesses)}", markup=False)
