"""Replaced-token detection: ELECTRA's joint loss (Clark et al. 2020, section 3), and metrics of the detector: ROC-AUC,
average precision and F1, from histograms that can be summed over batches and devices."""

import dataclasses
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from data_pipelines.examples.masking import Masking
from models.core.noise import fold, gumbel, site
from models.core.ranges import NOT_NEGATIVE, check_ranges
from pretrain.objectives.cross_entropy import binary_cross_entropy, predicted
from pretrain.objectives.masked_language_model import PAIRS, PREDICTIONS, check_layout, masked_rows
from pretrain.objectives.objective import Objective, Term, inputs_of
from pretrain.objectives.protocols import Detector, Encoder, Generator

GENERATOR_NOISE, DISCRIMINATOR_NOISE, SAMPLING_NOISE = range(3)
BINS = 4096  # over logits in [-LIMIT, LIMIT]; a logit of 0 (probability 0.5) is an edge
LIMIT = 16.0
LABELS = ("original_scores", "replaced_scores")  # names of the histograms, by label


@dataclasses.dataclass(frozen=True)
class ReplacedTokenDetection(Objective):
    """A generator's samples replace masked tokens; the trunk and its detector find the replaced ones."""

    asks = (Generator, Encoder, Detector)
    predictions = MappingProxyType({"generator": PREDICTIONS})

    # How rows are made: segment-pairs, sentence-pairs, packed-sentences, packed-across-documents, packed-documents (cut
    # so that rows are full), document-sentences
    layout: str = PAIRS
    masking: Masking = Masking(mask=0.85, random=0.0)
    discriminator_weight: float = 50.0  # lambda, the weight of the discriminator's loss

    def __post_init__(self):
        check_layout(self.layout, label=None)
        check_ranges(self, {"discriminator_weight": NOT_NEGATIVE}, "objective.")

    def rows(self, phase):
        return masked_rows(self.layout, phase.length, self.masking, label=None)

    def weights(self, batch):
        return super().weights(batch) | {"discriminator": (batch["segments"] > 0).sum().astype(jnp.float32)}

    def coefficients(self, step):
        return {"generator": 1.0, "discriminator": self.discriminator_weight}

    def loss(self, model, params, batch, carry, moment):
        variables, noise = {"params": params}, lambda tag: site(moment.noise, tag)
        inputs, slots = inputs_of(model, batch), batch["prediction_positions"]
        logits = model.apply(variables, inputs, slots, noise(GENERATOR_NOISE), method="generate")
        sampled = sample(logits, fold(moment.keys, SAMPLING_NOISE), slots.shape)
        original = write_predictions(batch["tokens"], batch, batch["prediction_targets"])
        corrupted = write_predictions(original, batch, sampled)
        replaced = (corrupted != original).astype(jnp.float32)  # a sample equal to the original is not replaced
        inputs |= {"tokens": corrupted}
        hidden = model.apply(variables, inputs, noise(DISCRIMINATOR_NOISE), method="encode")
        scores = model.apply(variables, hidden, method="token_scores")
        real = (batch["segments"] > 0).astype(jnp.float32)
        terms = {
            "generator": predicted(logits, batch["prediction_targets"], batch["prediction_weights"]),
            "discriminator": Term(jnp.sum(binary_cross_entropy(scores, replaced) * real)),
        }
        return terms, carry, {} if moment.train else score_histograms(scores, replaced, real)

    def report(self, counts):
        return detection_report(counts) if LABELS[0] in counts else {}


def sample(logits: Array, keys: Array, shape: tuple[int, int]) -> Array:
    """Sample one token per prediction from softmax(logits), by the Gumbel-max trick, without a gradient.

    logits: f32[batch * n, vocab]; keys: u32[batch, 2]; shape: (batch, n) -> i32[batch, n].
    """
    batch, n = shape
    logits = jax.lax.stop_gradient(logits).reshape(batch, n, -1)
    noisy = logits + gumbel(keys, (n, logits.shape[-1]))
    # Take the first index of the maximum; XLA:CPU does not vectorise argmax.
    best = noisy == noisy.max(axis=-1, keepdims=True)
    vocab = logits.shape[-1]
    return jnp.min(jnp.where(best, jnp.arange(vocab, dtype=jnp.int32), vocab - 1), axis=-1)


def write_predictions(tokens: Array, batch, values: Array) -> Array:
    """Write values i32[batch, n] into tokens i32[batch, length] at the prediction positions that are used."""
    beyond = tokens.shape[1]
    positions = jnp.where(batch["prediction_weights"] > 0, batch["prediction_positions"], beyond)
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(tokens, positions, values)


def score_histograms(logits: Array, labels: Array, weights: Array) -> dict[str, Array]:
    """Compute a histogram f32[BINS] of logits per label.   logits, labels in {0, 1}, weights: of one shape."""
    bins = jnp.floor((logits + LIMIT) * (BINS / (2 * LIMIT))).astype(jnp.int32)
    bins = jnp.clip(bins, 0, BINS - 1).reshape(-1)
    empty = jnp.zeros(BINS, jnp.float32)
    return {name: empty.at[bins].add((weights * (labels == label)).reshape(-1)) for label, name in enumerate(LABELS)}


def detection_report(counts) -> dict[str, float]:
    """Compute metrics of detecting label 1 ('replaced') by high scores, with baselines.

    base_rate: share of label 1, the average precision of random scores.   base_rate_entropy: loss in nats of always
    predicting the base rate. always_f1: F1 of always predicting 'replaced'.
    """
    negative, positive = (np.asarray(counts[name], np.float64)[::-1] for name in LABELS)  # from the highest score down
    negatives, positives = negative.sum(), positive.sum()
    if not (negatives and positives):
        return {}
    found, false = np.cumsum(positive), np.cumsum(negative)
    # Scores within a bin are ties: half of their pairs count as correctly ordered.
    auc = np.sum(negative * (found - positive / 2)) / (negatives * positives)
    precision = found / np.maximum(found + false, 1)
    rate = positives / (positives + negatives)
    at = BINS // 2 - 1  # last bin with a probability of at least 0.5
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
