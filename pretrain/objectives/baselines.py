"""What a model has to beat: guesses from token frequencies alone."""

from collections.abc import Iterable

import numpy as np

from data_pipelines.corpus import Corpus


def unigram(
    predictions: Iterable[tuple[np.ndarray, np.ndarray]], corpus: Corpus, end: int | None = None
) -> tuple[float, float]:
    """(cross-entropy in nats, accuracy) of the train split's unigram distribution.

    predictions: (targets, weights) of each batch, of one shape.   end: the token that ends each document in what is
    predicted, None where none does; no corpus holds it.   Frequencies are smoothed by one count per token; the
    guess is the most frequent token.
    """
    counts = corpus.token_counts().astype(np.float64) + 1.0
    if end is not None:
        counts[end] += corpus.size("train")["documents"]
    nats, best = -np.log(counts / counts.sum()), int(counts.argmax())
    loss = hits = total = 0.0
    for targets, weights in predictions:
        loss += float((nats[targets] * weights).sum())
        hits += float(((targets == best) * weights).sum())
        total += float(weights.sum())
    return loss / max(total, 1.0), hits / max(total, 1.0)
