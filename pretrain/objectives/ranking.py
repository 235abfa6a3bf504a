"""ROC-AUC, average precision and F1 of a detector from histograms, which add up over batches and devices."""

import jax.numpy as jnp
import numpy as np
from jax import Array

BINS = 4096  # over logits in [-LIMIT, LIMIT]; a logit of 0 (probability 0.5) is an edge
LIMIT = 16.0
LABELS = ("original_scores", "replaced_scores")  # names of the histograms, by label


def score_histograms(logits: Array, labels: Array, weights: Array) -> dict[str, Array]:
    """Histograms of the logits of each label: logits, labels in {0, 1} and weights of one shape -> f32[BINS] each."""
    bins = jnp.floor((logits + LIMIT) * (BINS / (2 * LIMIT))).astype(jnp.int32)
    bins = jnp.clip(bins, 0, BINS - 1).reshape(-1)
    empty = jnp.zeros(BINS, jnp.float32)
    return {name: empty.at[bins].add((weights * (labels == label)).reshape(-1)) for label, name in enumerate(LABELS)}


def detection_report(counts) -> dict[str, float]:
    """How well a high score finds label 1 ('replaced'), beside what guessing achieves.

    base_rate: share of label 1, the average precision of a random score.
    base_rate_entropy: loss in nats of always answering the base rate.
    always_f1: F1 of always answering 'replaced'.
    """
    negative, positive = (np.asarray(counts[name], np.float64)[::-1] for name in LABELS)  # from the highest score
    negatives, positives = negative.sum(), positive.sum()
    if not (negatives and positives):
        return {}
    found, false = np.cumsum(positive), np.cumsum(negative)
    # Scores within a bin are ties: half of their pairs count as ordered rightly.
    auc = np.sum(negative * (found - positive / 2)) / (negatives * positives)
    precision = found / np.maximum(found + false, 1)
    rate = positives / (positives + negatives)
    at = BINS // 2 - 1  # everything with a probability of at least 0.5
    f1 = 2 * found[at] / (found[at] + false[at] + positives)
    return {
        "roc_auc": float(auc),
        "average_precision": float(np.sum(precision * positive) / positives),
        "f1": float(f1),
        "always_f1": float(2 * rate / (1 + rate)),
        "base_rate": float(rate),
        "base_rate_entropy": float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate)),
        "discriminator_accuracy": float((found[at] + negatives - false[at]) / (positives + negatives)),
    }
