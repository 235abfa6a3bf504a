"""The whole way on the built-in corpus: prepare, train an ELECTRA, evaluate, plot, fill masks, export."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from pretrain.commands.export import export_run
from pretrain.commands.plot import plot
from pretrain.commands.tables import print_evaluation
from pretrain.objectives.inputs import inputs_of
from pretrain.options import Options
from pretrain.recipes.registry import find
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.restore import restore
from pretrain.training.run import run
from pretrain.training.signals import stop_request
from pretrain.training.trained import merge


def demo(folder: Path, steps: int | None) -> int:
    """Everything below `folder`; a second call goes on where the first stopped -> exit status."""
    console = Console(highlight=False, soft_wrap=True)
    corpus, workdir = folder / "corpus", folder / "run"
    step = lambda command: console.print(f"\n[bold]$ python -m {command}[/bold]")

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
    print_evaluation(workdir, every_checkpoint=False, corpus=None, examples=1024)
    step(f"pretrain plot {workdir} --out {folder / 'curves.png'}")
    console.print(plot([workdir], folder / "curves.png"))
    step(f"pretrain export {workdir} --to {folder / 'export'}")
    for exported in export_run(workdir, folder / "export"):
        console.print(exported)
    console.print("\n[bold]Masks that the generator fills in held-out text[/bold]")
    fill_masks(RunDirectory(workdir), console)
    own = 'to train on your own text: README, "From your text to a model"'
    console.print(f"\nThe model is in {folder / 'export'}; {own}")
    return 0


def fill_masks(directory: RunDirectory, console: Console, rows: int = 4, window: int = 12) -> None:
    """Print held-out snippets with one masked token each, what stood there and the generator's best guesses."""
    restored, (corpus,) = restore(directory), directory.open_corpora().values()
    recipe, tokenizer = restored.assembly.recipe, Tokenizer.from_file(str(directory.tokenizer / "tokenizer.json"))
    phase = recipe.phases[-1]
    examples = recipe.objective.examples(corpus, "heldout", phase, seed=1)
    spread = np.linspace(0, examples.number - 1, min(8 * rows, examples.number)).astype(np.int64)
    batch = examples.build(0, spread)
    model, params = restored.assembly.model, merge(restored.params, restored.frozen)
    generate = jax.jit(lambda *inputs: model.apply({"params": params}, *inputs, method="generate"))
    logits = generate(inputs_of(model, batch), batch["prediction_positions"])
    best = np.argsort(-np.asarray(logits).reshape(*batch["prediction_positions"].shape, -1), axis=-1)[..., :5]
    mask, shown_rows = corpus.special["mask"], 0
    is_word = lambda token: tokenizer.id_to_token(int(token)).isalpha()
    for row, tokens in enumerate(batch["tokens"]):
        targets = zip(batch["prediction_positions"][row], batch["prediction_targets"][row], strict=True)
        slots = [s for s, (at, target) in enumerate(targets) if tokens[at] == mask and is_word(target)]
        if not slots or shown_rows == rows:
            continue
        shown_rows += 1
        slot = slots[len(slots) // 2]
        at = batch["prediction_positions"][row][slot]
        near = range(max(0, at - window), min(len(tokens), at + window))
        shown = [tokenizer.id_to_token(int(tokens[i])) for i in near if batch["segments"][row][i]]
        guesses = ", ".join(tokenizer.id_to_token(int(token)) for token in best[row, slot])
        truth = tokenizer.id_to_token(int(batch["prediction_targets"][row][slot]))
        console.print(" ".join(shown).replace(" ##", ""), markup=False)
        console.print(f"    was: {truth}   guesses: {guesses}", markup=False)
