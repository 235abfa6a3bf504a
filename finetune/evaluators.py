"""Held-out metrics of a run: compares the answers to all rows of --dev with their labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from data_pipelines.tokenizers.made import Made
from finetune.predict import Predictor
from finetune.rows import Rows
from finetune.task import Examples, FinetuningTask
from models.core.parameters import Params
from pretrain.lora import merged
from pretrain.recipe import group_of
from pretrain.training.assembly import merge
from pretrain.training.placement import Stage


class Development(NamedTuple):
    """The held-out set of a task.   examples, rows: those of --dev.   made: the model's tokenizer."""

    examples: Examples
    rows: Rows
    labels: Sequence[str]
    made: Made


class DevelopmentSets:
    """The held-out sets of a phase's tasks, by name; an evaluator for `run_on`.
    Each stage of a phase trains one bucket; buckets of a task have the same name before the colon."""

    def __init__(self, sets: Mapping[str, Development], stages: Mapping[str, Stage]):
        self.sets, self.of = sets, {}
        for name, stage in stages.items():
            task, group = stage.task.objective, group_of(name)
            if group not in self.of:
                self.of[group] = task, Predictor(task, stage.assembly, stage.mesh, stage.phase.length)

    def __call__(self, params: Params, frozen: Params, trained: int) -> dict[str, float]:
        """Return the metrics of each task, and for several tasks the means of their losses and scores."""
        found: dict[str, dict[str, float]] = {}
        for name, (task, predictor) in self.of.items():
            found[name] = figures_of(task, predictor, params, frozen, self.sets[name])[0]
        if [*found] == [""]:
            return found[""]
        means = {figure: sum(one[figure] for one in found.values()) / len(found) for figure in ("loss", "score")}
        return means | {f"{name}/{figure}": value for name, one in found.items() for figure, value in one.items()}


def figures_of(
    task: FinetuningTask,
    predictor: Predictor,
    params: Params,
    frozen: Params,
    data: Development,
    tell: Callable[[int], Any] = lambda done: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the loss and metrics (empty for examples without labels) and the answers.
    tell: called with the number of further rows done."""
    predictions = predictor(params, frozen, data.rows, tell)
    generated = task.generated(predictor.model, merged(merge(params, frozen)), predictor.mesh, data.rows, data.made)
    answers = task.answers(data.examples, data.rows, {**predictions.outputs, **generated}, data.labels)
    if any(example.label is None for example in data.examples):
        return {}, answers
    terms, weights = predictions.sums  # the task's own, whatever their factors in training
    loss = sum(float(term.sum) / max(float(weights[name]), 1e-30) for name, term in terms.items())
    return {"loss": loss} | task.figures(data.examples, answers, data.labels), answers
