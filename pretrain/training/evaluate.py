"""Held-out evaluation on a fixed set: the same rows with the same corruption at every call."""

import collections
import itertools
import operator
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from data_pipelines.batches import evaluation_batches
from data_pipelines.checks import sound
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.parameters import Params
from pretrain.objectives.figures import figures, predicted_text, unigram
from pretrain.training.data import corpora_of, mixture_rates
from pretrain.training.placement import EVALUATION_SEED, Stage
from tpu.batches import place_rows


class Evaluators:
    """The fixed held-out sets of all tasks of a phase and their corpora; where there are several, figures have the
    names of theirs before them, and `loss` is the mean of theirs, by their rates in training."""

    def __init__(self, stages: Mapping[str, Stage], corpora: Mapping[str, Corpus], examples: int):
        self.of, self.rates = {}, {}
        for name, stage in stages.items():
            read = corpora_of(stage.task, corpora)
            rates = mixture_rates(stage.assembly.recipe, read) if len(read) > 1 else dict.fromkeys(read, 1.0)
            for corpus, one in read.items():
                place = "/".join(filter(None, (name, "" if stage.task.corpus else corpus)))
                self.of[place] = Evaluator(stage, one, examples)
                self.rates[place] = stage.task.rate * rates[corpus]

    def __call__(self, params: Params, frozen: Params, trained: int) -> dict[str, float]:
        """As `Evaluator` does."""
        figures = {name: evaluator(params, frozen, trained) for name, evaluator in self.of.items()}
        total = sum(self.rates.values())
        loss = sum(rate * figures[name]["loss"] for name, rate in self.rates.items()) / total
        return ({} if [*figures] == [""] else {"loss": loss}) | self._named(figures)

    def baselines(self) -> dict[str, float]:
        """As `Evaluator` does."""
        return self._named({name: evaluator.baselines() for name, evaluator in self.of.items()})

    def _named(self, figures: Mapping[str, dict[str, float]]) -> dict[str, float]:
        return {f"{where}/{name}" if where else name: x for where, of in figures.items() for name, x in of.items()}


class Evaluator:
    """The fixed held-out set of one task and corpus; examples: how many.

    Where the loss compares rows with one another, whole batches alone: rows that fill up would be compared too.
    """

    def __init__(self, stage: Stage, corpus: Corpus, examples: int):
        self.stage, self.objective, self.corpus = stage, stage.task.objective, corpus
        self.examples = examples
        self.held_out = self.objective.examples(corpus, "heldout", stage.phase, EVALUATION_SEED)
        with sound([corpus], "heldout"):
            self.real = [len(chosen) for chosen in self.held_out.fixed(examples)]  # rows of each batch; others fill up
        if not self.objective.rowwise:
            self._keep_whole()
        batches = self.batches()
        self.text = predicted_text(self.objective, batches, corpus)
        for _ in batches:  # to the end: what is damaged is found before anything is trained
            pass

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """The set's batches on the host, made anew each time: it may be of all documents."""
        with sound([self.corpus], "heldout"):
            yield from itertools.islice(evaluation_batches(self.held_out, self.examples), len(self.real))

    def __call__(self, params: Params, frozen: Params, trained: int) -> dict[str, float]:
        """The loss and all `figures`, after `trained` updates."""
        objective, size = self.objective, self.stage.evaluated_rows
        carries, total, examples = collections.defaultdict(self.stage.first_evaluation_carry), None, []
        for index, (batch, real) in enumerate(zip(self.batches(), self.real, strict=True)):
            for first in range(0, real, size):
                rows = {name: array[first : first + size] for name, array in batch.items()}
                placed = place_rows(rows, np.arange(size), size, self.stage.mesh)
                part, of_examples, carries[first] = self.stage.evaluate.run(
                    params, frozen, placed, np.int32(index), np.int32(first), carries[first], np.int32(trained)
                )
                examples.append({name: of[: real - first] for name, of in jax.device_get(of_examples).items()})
                total = part if total is None else jax.tree.map(operator.add, total, part)
        sums, counts = jax.device_get(total)
        counts |= {name: np.concatenate([of[name] for of in examples]) for name in objective.per_example}
        found, factors = figures(objective, [sums], counts, self.text), objective.coefficients(trained)
        seen = [term for term in sums.terms if f"{term}_loss" in found]
        return {"loss": sum(float(factors[term]) * found[f"{term}_loss"] for term in seen)} | found

    def baselines(self) -> dict[str, float]:
        """What needs no model, under the names of the figures that it stands beside."""
        with sound([self.corpus]):
            return unigram(self.objective, self.batches(), self.corpus, self.text)

    def _keep_whole(self) -> None:
        """Batches of real rows alone, which come first."""
        size = self.stage.phase.batch_size
        self.real = [real for real in self.real if real == size]
        if not self.real:
            raise UserError(
                f"--eval-examples {self.examples}: the held-out rows fill no batch of {size}, and "
                f"{type(self.objective).__name__} compares the rows of a batch with one another; give more, or lower "
                f"phases.{self.stage.index}.batch_size"
            )
