"""Sequence-to-sequence learning: a decoder predicts the tokens of a target from those before them and from an input
that an encoder reads (Vaswani et al. 2017, arXiv:1706.03762; Raffel et al. 2020, sections 3.1 and 3.3)."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.denoising import Denoising, Noises
from data_pipelines.examples.document_stream import counts_with_ends, end_token
from data_pipelines.examples.span_corruption import Corruption, SpanCorruption, sentinels
from data_pipelines.examples.text_to_text import END, PAD, Halves, Pairs, opening, start_token
from models.core.program import Program
from models.core.ranges import COUNT, NOT_NEGATIVE, RATE, check_choices, check_ranges
from models.families.registry import family_of
from pretrain.objectives.next_token_prediction import INPUT_TARGET, next_token_terms
from pretrain.objectives.objective import Objective, Phase
from pretrain.objectives.protocols import EncoderDecoder

SPANS, DENOISING, PREFIX, CAUSAL = "span-corruption", "denoising", "prefix", "causal"
LAYOUTS = SPANS, DENOISING, INPUT_TARGET, PREFIX, CAUSAL
FRAMED = DENOISING, INPUT_TARGET  # those whose targets may start with the end token


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
    """Layout of rows. `span-corruption`: targets are the spans that sentinels replace in the input; `denoising`: a text
    and the same text with noise as the input; `input-target`: the two segments of a document; `prefix`: a text split at
    a random place; `causal`: a text after an empty input."""
    corruption: Corruption = Corruption()
    noises: Noises = Noises()
    start: str = PAD
    """The model's start token: `pad` (T5), or `end` (BART), the end token; then inputs and targets of `denoising` and
    `input-target` also begin with the cls token, if the tokenizer has it."""
    z_loss: float = 0.0  # factor of the mean squared log-normaliser of the softmax (T5X: 1e-4)
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary (Vaswani et al. 2017, section 5.4)

    def __post_init__(self):
        check_ranges(self, {"z_loss": NOT_NEGATIVE, "label_smoothing": RATE}, "objective.")
        check_choices(self, {"layout": LAYOUTS, "start": (PAD, END)}, "objective.")
        read = {
            "corruption": (self.corruption == Corruption(), (SPANS,)),
            "noises": (self.noises == Noises(), (DENOISING,)),
            "start": (self.start == PAD, FRAMED),
        }
        for field, (is_default, layouts) in read.items():
            if not is_default and self.layout not in layouts:
                raise ValueError(f"objective.{field}: has no effect on objective.layout={self.layout}; leave it out")

    def check(self, model_config, corpus, phase):
        if self.layout not in FRAMED and start_of(model_config) == start_token(corpus.special, END):
            raise UserError(
                f"objective.layout={self.layout}: targets start with the end token; use {' or '.join(FRAMED)}"
            )
        check_start(model_config, corpus, self.start)

    def rows(self, phase):
        sizes = phase.length, phase.target_length
        if self.layout == SPANS:
            return SpanCorruption(*sizes, self.corruption)
        if self.layout == DENOISING:
            return Denoising(*sizes, self.noises, start=self.start)
        if self.layout == INPUT_TARGET:
            return Pairs(*sizes, start=self.start)
        return Halves(*sizes, causal=self.layout == CAUSAL)

    def weights(self, batch):
        return dict.fromkeys(self.coefficients(0), batch["weights"].sum())

    def coefficients(self, step):
        named = {"z": self.z_loss, "smoothing": self.label_smoothing}
        return {"lm": 1.0} | {term: factor for term, factor in named.items() if factor}

    def token_counts(self, corpus, phase):
        first = opening(corpus.special, start_token(corpus.special, self.start))
        if self.layout == DENOISING:
            counts, frame = corpus.token_counts().astype(np.float64), [*first, end_token(corpus)]
            counts[frame] += self.rows(phase).examples_of(corpus.size("train"))
            return counts
        counts = counts_with_ends(corpus, first)
        if self.layout != SPANS:
            return counts
        sizes = self.rows(phase).sizes
        rows = counts.sum() / (sizes.noise + sizes.text)
        counts *= sizes.noise / (sizes.noise + sizes.text)
        counts[[*sentinels(corpus.special)[: sizes.spans], end_token(corpus)]] += rows
        return counts

    def loss(self, model, params, batch, carry, moment):
        given = model, params, batch, self.predictions, self.z_loss, moment
        return next_token_terms(*given, "decode_targets", None, self.label_smoothing), carry, {}


def check_start(model_config: Any, corpus: Corpus, start: str | None = None) -> None:
    """Raise UserError if the model's start token is not the given one, PAD or END; None: if it is neither."""
    token = start_of(model_config)
    named = {name: start_token(corpus.special, name) for name in (PAD, END)}
    if token not in named.values():
        there = " or ".join(f"its {name} token {found}" for name, found in named.items() if found is not None)
        raise UserError(
            f"--corpus {corpus.path}: targets can follow {there}, but the model starts them with {token}; prepare it "
            f"with a tokenizer whose pad or end token is {token}"
        )
    if start is not None and token != named[start]:
        right = next(name for name in named if named[name] == token)
        raise UserError(f"objective.start={start}: is {named[start]}, the model starts with {token}; set it to {right}")


def start_of(model_config: Any) -> int:
    """Return the start token of an encoder-decoder's targets."""
    return family_of(model_config).module(model_config, Program()).start
