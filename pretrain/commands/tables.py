"""Tables on the screen."""

import dataclasses
import logging
from pathlib import Path

from rich.table import Table

from data_pipelines.errors import PassingError, UserError
from data_pipelines.progress import doing
from pretrain.objectives.next_token_prediction import DOCUMENTS, NextTokenPrediction, StridedPerplexity
from pretrain.recipe import phase_at
from pretrain.recipes.table import wide_console
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import Assembly
from pretrain.training.evaluate import Evaluators
from pretrain.training.placement import of_phase, stages
from pretrain.training.restore import Restored, restore

log = logging.getLogger(__name__)


def print_evaluation(
    run: Path,
    every_checkpoint: bool,
    corpus: str | None,
    examples: int,
    memory: int | None = None,
    stride: int | None = None,
) -> dict[str, float]:
    """Held-out figures of the newest or of every checkpoint, beside the baselines -> the newest's figures.

    memory: positions remembered, None for the recipe's.   stride: of whole documents, None for rows as in training.
    """
    directory = RunDirectory(run)
    newest = restore(directory)
    assembly, recipe = newest.assembly, newest.assembly.recipe
    assembly = assembly if memory is None else _remembering(assembly, memory)
    assembly = assembly if stride is None else striding(assembly, stride)
    placed = newest.stages if assembly is newest.assembly else stages(assembly, newest.mesh)
    steps = sorted({newest.step, *(directory.checkpoint_steps() if every_checkpoint else [])})
    columns, evaluator, phase = {}, None, None
    for step in steps:
        restored = newest if step == newest.step else _restored(directory, step)
        if restored is None:
            continue
        if phase != phase_at(recipe, step - 1):
            phase = phase_at(recipe, step - 1)
            evaluator = Evaluators(of_phase(placed, phase), directory.open_corpora(corpus), examples)
        doing(f"evaluating step {step}")
        columns[f"step {step}"] = evaluator(restored.params, restored.frozen, step)
    columns["unigram"] = evaluator.baselines()
    wide_console().print(_figures_table(f"held-out figures of {run}", columns))
    return columns[f"step {newest.step}"]


def _restored(directory: RunDirectory, step: int) -> Restored | None:
    """A checkpoint among others; None where it is damaged, or gone since they were listed, which is said."""
    try:
        return restore(directory, step)
    except PassingError:
        raise
    except UserError as error:
        log.warning("step %d is left out: %s", step, error)
        return None


def _remembering(assembly: Assembly, memory: int) -> Assembly:
    """The assembly with another memory in evaluation; UserError where the objective does not let it be chosen."""
    recipe = assembly.recipe
    if not hasattr(recipe.objective, "evaluation_memory"):
        raise UserError(f"--memory {memory}: {recipe.name} has no memory whose length could be chosen; leave it out")
    try:
        objective = dataclasses.replace(recipe.objective, evaluation_memory=memory)
    except ValueError as error:
        raise UserError(str(error).replace("objective.evaluation_memory=", "--memory ")) from None
    return assembly._replace(recipe=dataclasses.replace(recipe, objective=objective))


def striding(assembly: Assembly, stride: int) -> Assembly:
    """The assembly that reads whole documents, else as in training; UserError where the objective is not of next tokens
    of documents or no row fits."""
    recipe = assembly.recipe
    if not isinstance(recipe.objective, NextTokenPrediction):
        raise UserError(f"--stride {stride}: {recipe.name} does not predict next tokens of rows; leave it out")
    if recipe.objective.layout != DOCUMENTS:
        raise UserError(f"--stride {stride}: {recipe.name} reads rows of input and target; leave it out")
    objective = StridedPerplexity(**vars(recipe.objective), stride=stride)
    for phase in recipe.phases:
        objective.rows(phase)  # says what is wrong
    return assembly._replace(recipe=dataclasses.replace(recipe, objective=objective))


def _figures_table(title: str, columns: dict[str, dict[str, float]]) -> Table:
    table = Table("", *columns, title=title)
    names = dict.fromkeys(name for figures in columns.values() for name in figures)
    for name in names:
        cells = (f"{figures[name]:.4f}" if name in figures else "" for figures in columns.values())
        table.add_row(name.replace("_", " "), *cells)
    return table
