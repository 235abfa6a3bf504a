"""UniLM's cloze tasks (Dong et al. 2019, arXiv:1905.03197, section 2.3): masked tokens are predicted from both sides,
from the left, from the right, or in a target from its source and what stands before."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from data_pipelines.examples.masking import Masking
from data_pipelines.examples.unified_pairs import FIRST_TYPES, UnifiedPairs
from pretrain.objectives.cross_entropy import predicted
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.protocols import ClozeWriter

NAMES = "bidirectional", "sequence_to_sequence", "left_to_right", "right_to_left"  # as in `unified_pairs.TASKS`


@dataclasses.dataclass(frozen=True)
class UnifiedLanguageModel(MaskedLanguageModel):
    """Each row has one of the four tasks; evaluation also reports the loss of each."""

    layout: ClassVar[str] = ""
    next_sentence: ClassVar[bool] = False
    sentence_order: ClassVar[bool] = False
    globals: ClassVar[int] = 0
    masking: Masking = Masking(ngrams=(0.8, 0.1, 0.1))  # section 2.4

    def __post_init__(self):
        return

    @property
    def asks(self):
        return (ClozeWriter, *super().asks)

    def rows(self, phase):
        return UnifiedPairs(phase.length, self.masking)

    def counts(self, logits, batch):
        found = {}
        for name, first_type in zip(NAMES, FIRST_TYPES.tolist(), strict=True):
            weights = batch["prediction_weights"] * (batch["types"][:, :1] == first_type)
            found[name] = jnp.stack([predicted(logits, batch["prediction_targets"], weights).sum, weights.sum()])
        return found

    def report(self, counts):
        return {f"{name}_loss": float(nats / n) for name in NAMES if name in counts for nats, n in [counts[name]] if n}
