"""What a model has to beat: guesses from token frequencies alone."""

from collections.abc import Iterable, Sequence

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.examples.document_stream import code_tokens


def unigram(
    predictions: Iterable[tuple[np.ndarray, np.ndarray]], corpus: Corpus, ends: Sequence[int] = (), codes: bool = False
) -> tuple[float, float]:
    """(cross-entropy in nats, accuracy) of the train split's unigram distribution.

    predictions: (targets, weights) of each batch, of one shape.   ends: the tokens that each document has once more in
    what is predicted, and codes: whether its control code is predicted, too; no corpus holds these.   Frequencies are
    smoothed by one count per token; the guess is the most frequent token.
    """
    counts = corpus.token_counts().astype(np.float64) + 1.0
    for end in ends:
        counts[end] += corpus.size("train")["documents"]
    for part in corpus.parts if codes else ():
        found = code_tokens(part, "train")
        if found is not None:
            counts += np.bincount(found, minlength=len(counts))
    nats, best = -np.log(counts / counts.sum()), int(counts.argmax())
    loss = hits = total = 0.0
    for targets, weights in predictions:
        loss += float((nats[targets] * weights).sum())
        hits += float(((targets == best) * weights).sum())
        total += float(weights.sum())
    return loss / max(total, 1.0), hits / max(total, 1.0)
