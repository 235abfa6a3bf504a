"""Figures that follow from the sums of a loss's terms, and held-out evaluation on a fixed set: the same rows with the
same corruption at every call."""

import collections
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from data_pipelines.batches import evaluation_batches
from data_pipelines.corpus import Corpus, sound
from data_pipelines.errors import UserError
from data_pipelines.text.encoding import token_bytes
from models.core.parameters import Params
from pretrain.objectives.objective import Objective, Phase, Sums, Term
from pretrain.training.data import corpora_of, mixture_rates, task_rates
from pretrain.training.placement import EVALUATION_SEED, Stage
from tpu.batches import place_rows


class Text(NamedTuple):
    """How much text a set of batches predicts."""

    tokens: float
    bytes: float


def figures(
    objective: Objective, batches: Sequence[Sums], counts: Mapping[str, Any], text: Text | None = None
) -> dict[str, float]:
    """By name: of each term its loss, the mean over batches, and its accuracy; perplexity and bits per byte.

    A term without a single prediction has none.   text: of all the batches, where that is known.
    """
    found = {}
    for term in batches[0].terms:
        seen = [(one.terms[term], float(one.weights[term])) for one in batches if one.weights[term] > 0]
        if not seen:
            continue
        found[f"{term}_loss"] = float(np.mean([of.sum / weight for of, weight in seen]))
        if seen[0][0].hits is not None:
            found[f"{term}_accuracy"] = float(sum(of.hits for of, _ in seen) / sum(weight for _, weight in seen))
    if objective.left_to_right and (loss := found.get(f"{next(iter(batches[0].terms))}_loss")) is not None:
        found["perplexity"] = float(np.exp(loss))
        if text is not None:
            found["bits_per_byte"] = loss * text.tokens / max(text.bytes, 1) / math.log(2)
    return found | objective.report(counts)


def predicted_text(objective: Objective, batches: Iterable[Mapping[str, Any]], corpus: Corpus) -> Text | None:
    """What host batches predict of a text; None where that is none, or its tokens are not of bytes."""
    size = token_bytes(corpus.tokenizer_path) if objective.left_to_right else None
    if size is None:
        return None
    targets, weights = next(iter(objective.predictions.values()))
    tokens = predicted = 0.0
    for batch in batches:
        tokens += batch[weights].sum()
        predicted += (size[batch[targets]] * batch[weights]).sum()
    return Text(tokens, predicted)


def unigram(
    objective: Objective, phase: Phase, batches: Iterable[Mapping[str, Any]], corpus: Corpus, text: Text | None
) -> dict[str, float]:
    """`figures` of the train split's token frequencies, smoothed by one count per token; the guess is the most frequent
    one."""
    counts = objective.token_counts(corpus, phase) + 1.0
    nats, best = -np.log(counts / counts.sum()), int(counts.argmax())
    totals = {term: np.zeros(3) for term in objective.predictions}
    for batch in batches:
        for term, (targets, weights) in objective.predictions.items():
            weight, target = batch[weights], batch[targets]
            totals[term] += (nats[target] * weight).sum(), ((target == best) * weight).sum(), weight.sum()
    terms = {term: Term(loss, hits) for term, (loss, hits, _) in totals.items()}
    return figures(objective, [Sums(terms, {term: weight for term, (*_, weight) in totals.items()})], {}, text)


class Evaluators:
    """The fixed held-out sets of all tasks of a phase and their corpora; where there are several, figures have the
    names of theirs before them, and `loss`, of all and of a task with several corpora, is the mean of theirs, by their
    rates in training."""

    def __init__(self, stages: Mapping[str, Stage], corpora: Mapping[str, Corpus], examples: int):
        self.of, self.rates, self.tasks = {}, {}, dict.fromkeys(stages, ())
        for name, stage in stages.items():
            read = corpora_of(stage.task, corpora)
            rates = mixture_rates(stage.assembly.recipe, read) if len(read) > 1 else dict.fromkeys(read, 1.0)
            for corpus, one in read.items():
                place = "/".join(filter(None, (name, "" if stage.task.corpus else corpus)))
                self.of[place] = Evaluator(stage, one, examples)
                self.rates[place] = task_rates(stage.assembly.recipe, corpora, stage.index)[name] * rates[corpus]
                self.tasks[name] += (place,)

    def __call__(self, params: Params, frozen: Params, trained: int) -> dict[str, float]:
        """As `Evaluator` does."""
        figures = {name: evaluator(params, frozen, trained) for name, evaluator in self.of.items()}

        def loss(places):
            total = sum(self.rates[place] for place in places)
            return sum(self.rates[place] * figures[place]["loss"] for place in places) / total

        of_tasks = {f"{name}/loss": loss(places) for name, places in self.tasks.items() if name}
        return ({} if [*figures] == [""] else {"loss": loss(figures)}) | of_tasks | self._named(figures)

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
        if not self.real:
            raise UserError(
                f"--corpus {corpus.path}: its held-out split has no row of phases.{stage.index}; prepare it with a "
                f"larger --heldout, or lower phases.{stage.index}.length"
            )
        if not self.objective.rowwise:  # batches of real rows alone, which come first
            size, name = stage.phase.batch_size, type(self.objective).__name__
            self.real = [real for real in self.real if real == size]
            if not self.real:
                raise UserError(
                    f"--eval-examples {examples}: the held-out rows fill no batch of {size}, and {name} compares the "
                    f"rows of a batch with one another; give more, or lower phases.{stage.index}.batch_size"
                )
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
            return unigram(self.objective, self.stage.phase, self.batches(), self.corpus, self.text)
