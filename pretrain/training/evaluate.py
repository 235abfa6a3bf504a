"""Compute metrics from the sums of a loss's terms, and evaluate on a held-out set, always the same rows and noise."""

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
    """Amount of text that a set of batches predicts."""

    tokens: float
    bytes: float


def figures(
    objective: Objective, batches: Sequence[Sums], counts: Mapping[str, Any], text: Text | None = None
) -> dict[str, float]:
    """Compute metrics by name: loss (mean over batches) and accuracy of each term, perplexity and bits per byte. A term
    without predictions has no metrics.   text: of all batches, if known."""
    result = {}
    for term in batches[0].terms:
        seen = [(sums.terms[term], float(sums.weights[term])) for sums in batches if sums.weights[term] > 0]
        if not seen:
            continue
        result[f"{term}_loss"] = float(np.mean([total.sum / weight for total, weight in seen]))
        if seen[0][0].hits is not None:
            result[f"{term}_accuracy"] = float(sum(total.hits for total, _ in seen) / sum(weight for _, weight in seen))
    if objective.left_to_right and (loss := result.get(f"{next(iter(batches[0].terms))}_loss")) is not None:
        result["perplexity"] = float(np.exp(loss))
        if text is not None:
            result["bits_per_byte"] = loss * text.tokens / max(text.bytes, 1) / math.log(2)
    return result | objective.report(counts)


def predicted_text(objective: Objective, batches: Iterable[Mapping[str, Any]], corpus: Corpus) -> Text | None:
    """Measure the text that host batches predict; None if they predict no text or its tokens are not of bytes."""
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
    """Compute the `figures` of a unigram model, of the train split's token frequencies plus 1."""
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
    """Evaluates the fixed held-out sets of all tasks of a phase and their corpora. With several, the name of the task
    or corpus precedes each metric, and `loss` (overall, and of a task with several corpora) is the mean of their
    losses, weighted by their rates in training."""

    def __init__(self, stages: Mapping[str, Stage], corpora: Mapping[str, Corpus], examples: int):
        self.of, self.rates, self.tasks = {}, {}, dict.fromkeys(stages, ())
        for name, stage in stages.items():
            read = corpora_of(stage.task, corpora)
            rates = mixture_rates(stage.assembly.recipe, read) if len(read) > 1 else dict.fromkeys(read, 1.0)
            for corpus_name, corpus in read.items():
                place = "/".join(filter(None, (name, "" if stage.task.corpus else corpus_name)))
                self.of[place] = Evaluator(stage, corpus, examples)
                self.rates[place] = task_rates(stage.assembly.recipe, corpora, stage.index)[name] * rates[corpus_name]
                self.tasks[name] += (place,)

    def __call__(self, params: Params, frozen: Params, trained: int) -> dict[str, float]:
        """Evaluate all sets, as `Evaluator` does."""
        figures = {name: evaluator(params, frozen, trained) for name, evaluator in self.of.items()}

        def loss(places):
            total = sum(self.rates[place] for place in places)
            return sum(self.rates[place] * figures[place]["loss"] for place in places) / total

        of_tasks = {f"{name}/loss": loss(places) for name, places in self.tasks.items() if name}
        return ({} if [*figures] == [""] else {"loss": loss(figures)}) | of_tasks | self._named(figures)

    def baselines(self) -> dict[str, float]:
        """Compute the baselines of all sets, as `Evaluator` does."""
        return self._named({name: evaluator.baselines() for name, evaluator in self.of.items()})

    def _named(self, figures: Mapping[str, dict[str, float]]) -> dict[str, float]:
        return {f"{place}/{name}" if place else name: x for place, part in figures.items() for name, x in part.items()}


class Evaluator:
    """Evaluates the fixed held-out set of one task and corpus, with `examples` rows. If the loss compares the rows of a
    batch, only full batches are used, since padding rows would be compared too."""

    def __init__(self, stage: Stage, corpus: Corpus, examples: int):
        self.stage, self.objective, self.corpus = stage, stage.task.objective, corpus
        self.examples = examples
        self.held_out = self.objective.examples(corpus, "heldout", stage.phase, EVALUATION_SEED)
        with sound([corpus], "heldout"):
            self.real = [len(chosen) for chosen in self.held_out.fixed(examples)]  # rows per batch without padding
        if not self.real:
            raise UserError(
                f"--corpus {corpus.path}: its held-out split has no rows for phases.{stage.index}; prepare it with a "
                f"larger --heldout, or lower phases.{stage.index}.length"
            )
        if not self.objective.rowwise:  # full batches, which come first
            size, name = stage.phase.batch_size, type(self.objective).__name__
            self.real = [real for real in self.real if real == size]
            if not self.real:
                raise UserError(
                    f"--eval-examples {examples}: the held-out rows fill no batch of {size}, and {name} needs full "
                    f"batches; give more, or lower phases.{stage.index}.batch_size"
                )
        batches = self.batches()
        self.text = predicted_text(self.objective, batches, corpus)
        for _ in batches:  # read all batches now, to find damage before training
            pass

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Make the set's batches on the host, each time anew, since they may not fit into memory."""
        with sound([self.corpus], "heldout"):
            yield from itertools.islice(evaluation_batches(self.held_out, self.examples), len(self.real))

    def __call__(self, params: Params, frozen: Params, trained: int) -> dict[str, float]:
        """Compute the loss and all `figures` after `trained` updates."""
        objective, size = self.objective, self.stage.evaluated_rows
        carries, total, examples = collections.defaultdict(self.stage.first_evaluation_carry), None, []
        for index, (batch, real) in enumerate(zip(self.batches(), self.real, strict=True)):
            for first in range(0, real, size):
                rows = {name: array[first : first + size] for name, array in batch.items()}
                placed = place_rows(rows, np.arange(size), size, self.stage.mesh)
                part, of_examples, carries[first] = self.stage.evaluate.run(
                    params, frozen, placed, np.int32(index), np.int32(first), carries[first], np.int32(trained)
                )
                examples.append({name: x[: real - first] for name, x in jax.device_get(of_examples).items()})
                total = part if total is None else jax.tree.map(operator.add, total, part)
        sums, counts = jax.device_get(total)
        counts |= {name: np.concatenate([part[name] for part in examples]) for name in objective.per_example}
        result, factors = figures(objective, [sums], counts, self.text), objective.coefficients(trained)
        seen = [term for term in sums.terms if f"{term}_loss" in result]
        return {"loss": sum(float(factors[term]) * result[f"{term}_loss"] for term in seen if term in factors)} | result

    def baselines(self) -> dict[str, float]:
        """Compute baselines that need no model, under the names of the metrics that they compare with."""
        with sound([self.corpus]):
            return unigram(self.objective, self.stage.phase, self.batches(), self.corpus, self.text)
