"""What is said of a loss: figures that follow from the sums of its terms, and what a guess without a model reaches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from data_pipelines.corpus import Corpus
from data_pipelines.text.encoding import token_bytes
from pretrain.objectives.objective import Objective, Term


class Sums(NamedTuple):
    """Of a batch, or of several together. weights: the denominator of each term, f32[]."""

    terms: dict[str, Term]
    weights: dict[str, Array]


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
    objective: Objective, batches: Iterable[Mapping[str, Any]], corpus: Corpus, text: Text | None
) -> dict[str, float]:
    """`figures` of the train split's token frequencies, smoothed by one count per token; the guess is the most frequent
    one."""
    counts = objective.token_counts(corpus) + 1.0
    nats, best = -np.log(counts / counts.sum()), int(counts.argmax())
    totals = {term: np.zeros(3) for term in objective.predictions}
    for batch in batches:
        for term, (targets, weights) in objective.predictions.items():
            weight, target = batch[weights], batch[targets]
            totals[term] += (nats[target] * weight).sum(), ((target == best) * weight).sum(), weight.sum()
    terms = {term: Term(loss, hits) for term, (loss, hits, _) in totals.items()}
    return figures(objective, [Sums(terms, {term: weight for term, (*_, weight) in totals.items()})], {}, text)
