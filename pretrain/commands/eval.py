"""`python -m pretrain eval`: figures on a run's held-out set, beside what guessing reaches."""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from tyro.conf import Positional

from data_pipelines.command_line import Place
from data_pipelines.errors import PassingError, UserError
from data_pipelines.progress import doing
from models.core.ranges import COUNT
from pretrain.commands.common import import_models, parse_checked, wide_console

if TYPE_CHECKING:
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.assembly import Assembly
    from pretrain.training.opened import Restored

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluate a run on its fixed held-out set."""

    run: Positional[Place]
    """Work directory of the run."""
    all: bool = False
    """Every checkpoint, not only the newest."""
    best: str | None = None
    """In place of the newest the one with the lowest held-out loss: of a task, by its name, or of the run, by the name
    loss."""
    corpus: str | None = None
    """Where the run's corpus is now, or several by name, if it has moved."""
    examples: int | None = None
    """Rows of the held-out set: by default 1024, with --stride all."""
    memory: int | None = None
    """Positions that a language model remembers here, if not as many as in its recipe."""
    stride: int | None = None
    """Of all documents whole, in rows that begin so many tokens after each other and predict what no row before has."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Eval, arguments, "eval", {"examples": COUNT})
    import_models()
    evaluate(options)
    return 0


def evaluate(options: Eval) -> dict[str, float]:
    """Print held-out figures of the newest or of every checkpoint, beside the baselines -> the newest's figures."""
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.evaluate import Evaluators
    from pretrain.training.opened import open_model
    from pretrain.training.placement import of_phase, stages

    directory, newest = RunDirectory(options.run), open_model(options.run, best_of=options.best).run
    if newest is None:
        raise UserError(f"eval {options.run}: a Hugging Face folder has no objective and no corpus; give a run")
    assembly = newest.assembly if options.memory is None else _remembering(newest.assembly, options.memory)
    assembly = assembly if options.stride is None else striding(assembly, options.stride)
    examples = options.examples or (1024 if options.stride is None else sys.maxsize)
    placed = newest.stages if assembly is newest.assembly else stages(assembly, newest.mesh)
    steps = sorted({newest.step, *(directory.checkpoint_steps() if options.all else [])})
    columns, evaluator, phase = {}, None, None
    for step in steps:
        restored = newest if step == newest.step else _restored(directory, step)
        if restored is None:
            continue
        if phase != restored.phase:
            phase = restored.phase
            evaluator = Evaluators(of_phase(placed, phase), directory.open_corpora(options.corpus), examples)
        doing(f"evaluating step {step}")
        columns[f"step {step}"] = evaluator(restored.params, restored.frozen, step)
    columns["unigram"] = evaluator.baselines()
    table = Table("", *columns, title=f"held-out figures of {options.run}")
    for name in dict.fromkeys(name for figures in columns.values() for name in figures):
        cells = (f"{figures[name]:.4f}" if name in figures else "" for figures in columns.values())
        table.add_row(name.replace("_", " "), *cells)
    wide_console().print(table)
    return columns[f"step {newest.step}"]


def _restored(directory: "RunDirectory", step: int) -> "Restored | None":
    """A checkpoint among others; None where it is damaged, or gone since they were listed, which is said."""
    from pretrain.training.opened import restore

    try:
        return restore(directory, step)
    except PassingError:
        raise
    except UserError as error:
        log.warning("step %d is left out: %s", step, error)
        return None


def _remembering(assembly: "Assembly", memory: int) -> "Assembly":
    """The assembly with another memory in evaluation; UserError where an objective does not let it be chosen."""
    from pretrain.recipe import with_objectives

    def remembering(objective):
        if not hasattr(objective, "evaluation_memory"):
            name = assembly.recipe.name
            raise UserError(f"--memory {memory}: {name} has no memory whose length could be chosen; leave it out")
        return dataclasses.replace(objective, evaluation_memory=memory)

    try:
        return assembly._replace(recipe=with_objectives(assembly.recipe, remembering))
    except ValueError as error:
        raise UserError(str(error).replace("objective.evaluation_memory=", "--memory ")) from None


def striding(assembly: "Assembly", stride: int) -> "Assembly":
    """The assembly that reads whole documents, else as in training; UserError where an objective is not of next tokens
    of documents or no row fits."""
    from pretrain.objectives.next_token_prediction import DOCUMENTS, NextTokenPrediction, StridedPerplexity
    from pretrain.recipe import every_task, with_objectives

    name = assembly.recipe.name

    def strided(objective):
        if not isinstance(objective, NextTokenPrediction):
            raise UserError(f"--stride {stride}: {name} does not predict next tokens of rows; leave it out")
        if objective.layout != DOCUMENTS:
            raise UserError(f"--stride {stride}: {name} reads rows of input and target; leave it out")
        return StridedPerplexity(**vars(objective), stride=stride)

    recipe = with_objectives(assembly.recipe, strided)
    for _, phase, task in every_task(recipe):
        task.objective.rows(phase)  # says what is wrong
    return assembly._replace(recipe=recipe)
