"""Sequence-to-sequence learning: a decoder predicts the tokens of a target from those before them and from an input
that an encoder reads (Raffel et al. 2020, sections 3.1 and 3.3)."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import counts_with_ends, end_token
from data_pipelines.examples.span_corruption import Corruption, SpanCorruption, sentinels
from data_pipelines.examples.text_to_text import Halves, Pairs
from models.core.program import Program
from models.core.ranges import COUNT, NOT_NEGATIVE, check_ranges
from models.families.registry import family_of
from pretrain.objectives.next_token_prediction import INPUT_TARGET, next_token_terms
from pretrain.objectives.objective import Objective, Phase
from pretrain.objectives.protocols import EncoderDecoder

SPANS, PREFIX, CAUSAL = "span-corruption", "prefix", "causal"


@dataclasses.dataclass(frozen=True)
class PhaseWithTargets(Phase):
    """A phase of inputs and targets; T5 has inputs of 512 tokens and targets of 114."""

    target_length: int = 114  # tokens per target

    def __post_init__(self):
        check_ranges(self, {"target_length": COUNT}, "")

    def __str__(self) -> str:
        return f"{self.batch_size} rows of {self.length} and {self.target_length} tokens"


@dataclasses.dataclass(frozen=True)
class SequenceToSequence(Objective):
    """The layout determines inputs and targets."""

    asks = (EncoderDecoder,)
    phase = PhaseWithTargets
    predictions: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({"lm": ("targets", "weights")})

    layout: str = SPANS
    """Layout of rows. `span-corruption`: targets are the spans that sentinels replace in the input; `input-target`: the
    two segments of a document; `prefix`: a text split at a random place; `causal`: a text after an empty input."""
    corruption: Corruption = Corruption()
    z_loss: float = 0.0  # factor of the mean squared log-normaliser of the softmax (T5X: 1e-4)

    def __post_init__(self):
        check_ranges(self, {"z_loss": NOT_NEGATIVE}, "objective.")
        if self.layout not in (SPANS, INPUT_TARGET, PREFIX, CAUSAL):
            raise ValueError(f"objective.layout={self.layout!r}: use {SPANS}, {INPUT_TARGET}, {PREFIX} or {CAUSAL}")
        if self.layout != SPANS and self.corruption != Corruption():
            raise ValueError(f"objective.corruption: has no effect on objective.layout={self.layout}; leave it out")

    def check(self, model_config, corpus, phase):
        check_start(model_config, corpus)

    def rows(self, phase):
        sizes = phase.length, phase.target_length
        if self.layout == SPANS:
            return SpanCorruption(*sizes, self.corruption)
        return Pairs(*sizes) if self.layout == INPUT_TARGET else Halves(*sizes, causal=self.layout == CAUSAL)

    def weights(self, batch):
        return super().weights(batch) | ({"z": batch["weights"].sum()} if self.z_loss else {})

    def coefficients(self, step):
        return {"lm": 1.0} | ({"z": self.z_loss} if self.z_loss else {})

    def token_counts(self, corpus, phase):
        counts = counts_with_ends(corpus)
        if self.layout != SPANS:
            return counts
        sizes = self.rows(phase).sizes
        rows = counts.sum() / (sizes.noise + sizes.text)
        counts *= sizes.noise / (sizes.noise + sizes.text)
        counts[[*sentinels(corpus.special)[: sizes.spans], end_token(corpus)]] += rows
        return counts

    def loss(self, model, params, batch, carry, moment):
        arguments = model, params, batch, self.predictions, self.z_loss, moment
        return next_token_terms(*arguments, decode="decode_targets", axis=None), carry, {}


def check_start(model_config: Any, corpus: Corpus) -> None:
    """Raise UserError if targets follow another token in training than the model's start token."""
    start, pad = family_of(model_config).module(model_config, Program()).start, corpus.special["pad"]
    if start != pad:
        raise UserError(
            f"--corpus {corpus.path}: targets follow its pad token {pad}, but the model starts them with {start}; "
            f"prepare it with a tokenizer whose pad token is {start}"
        )
