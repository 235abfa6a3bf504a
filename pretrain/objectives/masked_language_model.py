"""Masked language modelling, optionally with next-sentence prediction (Devlin et al. 2019, section 3.1) or
sentence-order prediction (Lan et al. 2019, section 3.1)."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from data_pipelines.errors import UserError
from data_pipelines.examples.dialogues import TURNS, Dialogues
from data_pipelines.examples.layout import RowLayout
from data_pipelines.examples.masking import TOKEN, Masking
from data_pipelines.examples.packed_sentences import PackedSentences, SentenceGlobals
from data_pipelines.examples.segment_pairs import NEXT_SENTENCE, SENTENCE_ORDER, SegmentPairs, SentencePairs
from models.attention.patterns.pattern import DENSE
from models.blocks.heads import PAIR, TOKENS
from models.families.registry import family_of
from pretrain.objectives.cross_entropy import predicted
from pretrain.objectives.objective import Batch, Objective, Phase, Term, inputs_of
from pretrain.objectives.protocols import Encoder

PAIRS, SENTENCE_PAIRS, DIALOGUES = "segment-pairs", "sentence-pairs", "dialogues"
PACKED, PACKED_ACROSS, ONE_DOCUMENT = "packed-sentences", "packed-across-documents", "document-sentences"
FILLED = "packed-documents"

PREDICTIONS = "prediction_targets", "prediction_weights"  # arrays of a batch

PACKED_AS = {PACKED: {}, PACKED_ACROSS: {"cross_document_attention": True}, ONE_DOCUMENT: {"one_document": True}}
PACKED_AS |= {FILLED: {"cut": True}}
# Layouts of pairs or of turns, which may have a label
PAIRED = {PAIRS: SegmentPairs, SENTENCE_PAIRS: SentencePairs, DIALOGUES: Dialogues}
LAYOUTS = PAIRED | {name: partial(PackedSentences, **how) for name, how in PACKED_AS.items()}


def masked_rows(layout: str, length: int, masking: Masking, label: str | None) -> RowLayout:
    """Return the layout of masked rows.   label: name of the pairs' label; None without one."""
    return LAYOUTS[layout](length, masking, *([label] if layout in PAIRED else []))


def check_layout(layout: str, label: str | None) -> None:
    """Raise ValueError for an unknown layout, or for a label (`objective.LABEL`) without pairs."""
    if layout not in LAYOUTS:
        raise ValueError(f"objective.layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if label and layout not in PAIRED:
        raise ValueError(f"objective.layout={layout!r}: has no pairs; use {PAIRS!r} or objective.{label}=False")


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModel(Objective):
    """Masked tokens are predicted; the label of a pair is predicted at position 0."""

    predictions = MappingProxyType({"mlm": PREDICTIONS})

    # How rows are made: segment-pairs, sentence-pairs, dialogues, packed-sentences, packed-across-documents,
    # packed-documents (cut so that rows are full), document-sentences
    layout: str = PAIRS
    next_sentence: bool = True  # also classify whether B follows A or is random; in dialogues, whether a turn is
    sentence_order: bool = False  # also classify whether B follows A or A follows B; excludes next_sentence
    masking: Masking = Masking()
    globals: int = 0  # number of global tokens of a row in any sparse pattern: its first token, then separators

    def __post_init__(self):
        if self.next_sentence and self.sentence_order:
            raise ValueError("objective.next_sentence=True, sentence_order=True: a pair has one label; unset one")
        check_layout(self.layout, self.label)

    @property
    def label(self) -> str | None:
        """Return the label's name, of the field above, the batch's array and the loss's term; None without one."""
        return NEXT_SENTENCE if self.next_sentence else SENTENCE_ORDER if self.sentence_order else None

    @property
    def asks(self):
        return (Encoder, TOKENS, PAIR) if self.label else (Encoder, TOKENS)

    def check(self, model_config, corpus, phase):
        if self.layout == DIALOGUES and model_config.types < TURNS:
            raise UserError(f"model.types={model_config.types}: dialogues have {TURNS} turns; use {TURNS} or more")
        if not self.globals:
            return
        family, setting = family_of(model_config), f"objective.globals={self.globals}"
        if "globals" not in family.inputs:
            raise UserError(f"{setting}: {type(model_config).__name__} has no global tokens; set it to 0")
        if model_config.pattern.name == DENSE and not getattr(model_config, "global_projections", False):
            raise UserError(f"{setting}: has no effect with model.pattern.name=dense; set it to 0")

    def rows(self, phase):
        try:
            rows = masked_rows(self.layout, phase.length, self.masking, self.label)
            return dataclasses.replace(rows, global_tokens=self.globals)
        except UserError as error:
            raise UserError(f"objective.{error}") from None

    def weights(self, batch):
        labelled = {self.label: (batch[self.label] >= 0).sum().astype(jnp.float32)} if self.label else {}
        return super().weights(batch) | labelled

    def coefficients(self, step):
        return super().coefficients(step) | ({self.label: 1.0} if self.label else {})

    def loss(self, model, params, batch, carry, moment):
        apply, slots = partial(model.apply, {"params": params}), self.slots(batch)
        hidden = apply(inputs_of(model, batch), moment.noise, slots, method="encode")
        terms, logits = self.terms(apply, hidden, batch)
        return terms, carry, {} if moment.train else self.counts(logits, batch)

    def slots(self, batch: Batch) -> Array:
        """Return the positions that heads read, i32[rows, n]: position 0 for a label, then the masked ones."""
        return jnp.pad(batch["prediction_positions"], ((0, 0), (int(self.label is not None), 0)))

    def terms(self, apply: Callable, hidden: Array, batch: Batch) -> tuple[dict[str, Term], Array]:
        """Compute (the terms, the logits of masked tokens f32[rows * n, vocab]).   hidden: at `slots`."""
        head = partial(apply, method="apply_head")
        terms, labels = {}, batch[self.label] if self.label else None
        if labels is not None:
            weights = (labels >= 0).astype(jnp.float32)
            terms[self.label], hidden = predicted(head(PAIR, hidden[:, 0]), labels, weights), hidden[:, 1:]
        logits = head(TOKENS, hidden)
        return terms | {"mlm": predicted(logits, batch["prediction_targets"], batch["prediction_weights"])}, logits

    def counts(self, logits: Array, batch: Batch) -> dict[str, Array]:
        """Return the counts of evaluation.   logits: f32[rows * n, vocab], of the predicted tokens."""
        return {}


@dataclasses.dataclass(frozen=True)
class GlobalPhase(Phase):
    """A phase of rows with global tokens, each of which represents a sentence of the row."""

    globals: int = 256  # number of global tokens in addition to each row

    def __str__(self) -> str:
        return f"{super().__str__()} and {self.globals} global ones"


@dataclasses.dataclass(frozen=True)
class MaskedWithGlobals(MaskedLanguageModel):
    """Masked tokens are predicted in rows with global tokens; ETC's objective of these (CPC) is not implemented."""

    phase: ClassVar[type[Phase]] = GlobalPhase
    # How rows are made: packed-sentences, packed-across-documents, packed-documents or document-sentences
    layout: str = PACKED_ACROSS
    next_sentence: ClassVar[bool] = False
    sentence_order: ClassVar[bool] = False
    globals: ClassVar[int] = 0  # among the row's own tokens

    def __post_init__(self):
        super().__post_init__()
        if self.layout not in PACKED_AS:
            raise ValueError(f"objective.layout={self.layout!r}: has no global tokens; use {' or '.join(PACKED_AS)}")

    def rows(self, phase):
        return SentenceGlobals(phase.length, self.masking, globals=phase.globals, **PACKED_AS[self.layout])


@dataclasses.dataclass(frozen=True)
class UnitPhase(Phase):
    """A phase with a unit of masking, as ERNIE's stages mask tokens, phrases and entities (Sun et al. 2019,
    arXiv:1904.09223, section 4.2)."""

    unit: str = TOKEN  # what is masked as a whole: token, or a field of the corpus that marks where units begin

    def __str__(self) -> str:
        return f"{super().__str__()}, masks by {self.unit}"


@dataclasses.dataclass(frozen=True)
class MaskedUnits(MaskedLanguageModel):
    """Masked units, of each phase's kind, are predicted; the label of a pair is predicted at position 0."""

    phase: ClassVar[type[Phase]] = UnitPhase

    def __post_init__(self):
        super().__post_init__()
        if self.masking.unit != TOKEN:
            raise ValueError(f"objective.masking.unit={self.masking.unit!r}: each phase has its own, phases.0.unit")

    def rows(self, phase):
        return dataclasses.replace(super().rows(phase), masks=dataclasses.replace(self.masking, unit=phase.unit))
