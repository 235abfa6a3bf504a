"""Metrics of answers, from standard libraries. Shares are between 0 and 1."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pretrain.storage.best import SCORE

OF_CLASSES = "accuracy", "f1", "matthews"
OF_NUMBERS = "pearson", "spearman", "error"
SPAN = re.compile(r"O|[BIESMLU]-.+")  # a tag of a span scheme


def with_score(figures: Mapping[str, float], metric: str = "") -> dict[str, float]:
    """Return the metrics with one of them, by default the first, as the score that selects models."""
    name = metric or next(iter(figures))
    return {SCORE: -figures[name] if name == "error" else figures[name], **figures}


def of_classes(right: Sequence[str], given: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Return scikit-learn's accuracy, F1 (with two classes, that of the second, as in GLUE; else the mean over classes)
    and Matthews correlation."""
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    how = {"average": "binary", "pos_label": labels[-1]} if len(labels) == 2 else {"average": "macro"}
    return {
        "accuracy": float(accuracy_score(right, given)),
        "f1": float(f1_score(right, given, zero_division=0.0, **how)),
        "matthews": float(matthews_corrcoef(right, given)),
    }


def of_numbers(right: Sequence[float], given: Sequence[float]) -> dict[str, float]:
    """Return scipy's Pearson and Spearman correlations (0 if all numbers are equal) and the mean squared error."""
    from scipy.stats import pearsonr, spearmanr

    def correlation(function: Callable) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(np.nan_to_num(function(right, given).statistic)) if len(right) > 1 else 0.0

    error = float(np.mean(np.square(np.subtract(right, given))))
    return {"pearson": correlation(pearsonr), "spearman": correlation(spearmanr), "error": error}


def of_tags(right: Sequence[list[str]], given: Sequence[list[str]], labels: Sequence[str]) -> dict[str, float]:
    """Return the accuracy over words, preceded by seqeval's F1, precision and recall of spans if all labels are span
    tags. As in CoNLL-2000's script, an inside tag that continues no span starts one.
    Span tags begin with B, I, E or S; M, L and U are other names of I, E and S."""
    from seqeval.metrics import accuracy_score
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    accuracy = {"accuracy": float(accuracy_score(right, given))}
    if not all(map(SPAN.fullmatch, labels)):
        return accuracy
    names = {"M": "I", "L": "E", "U": "S"}
    right, given = ([[names.get(tag[0], tag[0]) + tag[1:] for tag in tags] for tags in side] for side in (right, given))
    precision, recall, f1, _ = precision_recall_fscore_support(right, given, average="micro", zero_division=0)
    return {"f1": float(f1), "precision": float(precision), "recall": float(recall)} | accuracy
