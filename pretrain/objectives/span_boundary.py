"""SpanBERT's objective (Joshi et al. 2020, arXiv:1907.10529, section 3): masked tokens, which come in spans, and the
same tokens from the two beside their span (the span boundary objective, SBO)."""

import dataclasses
from types import MappingProxyType
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from data_pipelines.examples.masking import Masking
from models.blocks.heads import TOKENS
from models.blocks.span_boundary import BOUNDARY
from pretrain.objectives.cross_entropy import predicted
from pretrain.objectives.masked_language_model import ONE_DOCUMENT, PREDICTIONS, MaskedLanguageModel
from pretrain.objectives.objective import inputs_of
from pretrain.objectives.protocols import Encoder

# Lengths in words by a geometric distribution with p = 0.2, of at most 10: 3.8 on average
GEOMETRIC = tuple(0.2 * 0.8**shorter for shorter in range(10))


@dataclasses.dataclass(frozen=True)
class SpanBoundaryObjective(MaskedLanguageModel):
    """Masked tokens are predicted by themselves, and from beside their span (equation 2). Spans that touch are one."""

    predictions = MappingProxyType({"mlm": PREDICTIONS, "sbo": PREDICTIONS})
    asks = (Encoder, TOKENS, BOUNDARY)

    # How rows are made: document-sentences, packed-sentences, packed-across-documents or packed-documents
    layout: str = ONE_DOCUMENT
    next_sentence: ClassVar[bool] = False
    sentence_order: ClassVar[bool] = False
    masking: Masking = Masking(unit="word_starts", ngrams=GEOMETRIC, fate="span")

    def loss(self, model, params, batch, carry, moment):
        positions, weights = batch["prediction_positions"], batch["prediction_weights"]
        targets = batch["prediction_targets"]
        first, last = ends(positions, weights > 0)
        slots = jnp.concatenate([positions, jnp.maximum(first - 1, 0), last + 1], axis=1)
        variables, inputs = {"params": params}, (inputs_of(model, batch), moment.noise, slots)
        hidden, left, right = jnp.split(model.apply(variables, *inputs, method="encode"), 3, axis=1)
        logits = model.apply(variables, TOKENS, hidden, method="apply_head")
        beside = {"right": right, "places": positions - first}
        of_boundary = model.apply(variables, BOUNDARY, left, method="apply_head", **beside)
        terms = {"mlm": predicted(logits, targets, weights), "sbo": predicted(of_boundary, targets, weights)}
        return terms, carry, {}


def ends(positions: Array, used: Array) -> tuple[Array, Array]:
    """Return the first and the last position of the span of each predicted token: i32[rows, n].   positions: i32[rows,
    n], ascending where bool[rows, n] `used`. Others are spans of their own."""
    joined = (positions[:, 1:] == positions[:, :-1] + 1) & used[:, 1:]
    begins = jnp.pad(~joined, ((0, 0), (1, 0)), constant_values=True)
    closes = jnp.pad(~joined, ((0, 0), (0, 1)), constant_values=True)
    furthest = jnp.iinfo(positions.dtype).max
    first = jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)
    last = jax.lax.cummin(jnp.where(closes & used, positions, furthest), axis=1, reverse=True)
    return jnp.where(used, first, positions), jnp.where(used, last, positions)
