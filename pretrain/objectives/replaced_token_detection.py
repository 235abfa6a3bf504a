"""Replaced-token detection: ELECTRA's joint loss (Clark et al. 2020, section 3)."""

import dataclasses
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import Array

from data_pipelines.examples.masking import Masking
from models.core.noise import fold, gumbel, site
from models.core.ranges import NOT_NEGATIVE, check_ranges
from pretrain.objectives import layouts
from pretrain.objectives.cross_entropy import binary_cross_entropy, cross_entropy
from pretrain.objectives.inputs import inputs_of
from pretrain.objectives.objective import Objective, Term
from pretrain.objectives.protocols import Detector, Encoder, Generator
from pretrain.objectives.ranking import LABELS, detection_report, score_histograms

GENERATOR_NOISE, DISCRIMINATOR_NOISE, SAMPLING_NOISE = range(3)


@dataclasses.dataclass(frozen=True)
class ReplacedTokenDetection(Objective):
    """A generator's guesses take the place of masked tokens; the trunk and its detector find them."""

    asks = (Generator, Encoder, Detector)
    predictions = MappingProxyType({"generator": layouts.PREDICTIONS})

    # How rows are made: segment-pairs, sentence-pairs, packed-sentences, packed-across-documents, document-sentences
    layout: str = layouts.PAIRS
    masking: Masking = Masking(mask=0.85, random=0.0)
    discriminator_weight: float = 50.0  # lambda, the weight of its loss beside the generator's

    def __post_init__(self):
        layouts.check_layout(self.layout, label=None)
        check_ranges(self, {"discriminator_weight": NOT_NEGATIVE}, "objective.")

    def rows(self, phase):
        return layouts.LAYOUTS[self.layout].layout(phase.length, self.masking, None)

    def weights(self, batch):
        return super().weights(batch) | {"discriminator": (batch["segments"] > 0).sum().astype(jnp.float32)}

    def coefficients(self, step):
        return {"generator": 1.0, "discriminator": self.discriminator_weight}

    def loss(self, model, params, batch, carry, moment):
        variables, noise = {"params": params}, lambda tag: site(moment.noise, tag)
        inputs, slots = inputs_of(model, batch), batch["prediction_positions"]
        logits = model.apply(variables, inputs, slots, noise(GENERATOR_NOISE), method="generate")
        losses, hits = cross_entropy(logits, batch["prediction_targets"].reshape(-1))
        weights = batch["prediction_weights"].reshape(-1)

        sampled = sample(logits, fold(moment.keys, SAMPLING_NOISE), slots.shape)
        original = write_predictions(batch["tokens"], batch, batch["prediction_targets"])
        corrupted = write_predictions(original, batch, sampled)
        replaced = (corrupted != original).astype(jnp.float32)  # a sample that hits the original is no replacement
        inputs |= {"tokens": corrupted}
        hidden = model.apply(variables, inputs, noise(DISCRIMINATOR_NOISE), method="encode")
        scores = model.apply(variables, hidden, method="token_scores")
        real = (batch["segments"] > 0).astype(jnp.float32)
        terms = {
            "generator": Term(jnp.sum(losses * weights), jnp.sum(hits * weights)),
            "discriminator": Term(jnp.sum(binary_cross_entropy(scores, replaced) * real)),
        }
        return terms, carry, {} if moment.train else score_histograms(scores, replaced, real)

    def report(self, counts):
        return detection_report(counts) if LABELS[0] in counts else {}


def sample(logits: Array, keys: Array, shape: tuple[int, int]) -> Array:
    """One token per prediction from softmax(logits), by the Gumbel maximum; no gradient passes.

    logits: f32[batch * n, vocab]; keys: u32[batch, 2]; shape: (batch, n) -> i32[batch, n].
    """
    batch, n = shape
    logits = jax.lax.stop_gradient(logits).reshape(batch, n, -1)
    noisy = logits + gumbel(keys, (n, logits.shape[-1]))
    # The first index that attains the maximum; XLA:CPU runs argmax's paired reduction without vector instructions.
    best = noisy == noisy.max(axis=-1, keepdims=True)
    vocab = logits.shape[-1]
    return jnp.min(jnp.where(best, jnp.arange(vocab, dtype=jnp.int32), vocab - 1), axis=-1)


def write_predictions(tokens: Array, batch, values: Array) -> Array:
    """tokens i32[batch, length] with values i32[batch, n] at the batch's prediction positions; unused slots drop."""
    beyond = tokens.shape[1]
    positions = jnp.where(batch["prediction_weights"] > 0, batch["prediction_positions"], beyond)
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(tokens, positions, values)
