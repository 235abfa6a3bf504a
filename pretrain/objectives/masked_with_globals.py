"""Masked language modelling of rows with global tokens beside them (BigBird-ETC: Zaheer et al. 2020, section 2)."""

import dataclasses
from typing import ClassVar

from data_pipelines.examples.sentence_globals import SentenceGlobals
from pretrain.objectives.layouts import PACKED, PACKED_ACROSS
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.phase import Phase


@dataclasses.dataclass(frozen=True)
class GlobalPhase(Phase):
    """Rows with global tokens, each of which stands for a sentence of the row."""

    globals: int = 256  # global tokens beside each row


@dataclasses.dataclass(frozen=True)
class MaskedWithGlobals(MaskedLanguageModel):
    """Tokens of the row are predicted; of ETC's objectives without the one of global tokens (CPC), an option there."""

    phase: ClassVar[type[Phase]] = GlobalPhase
    layout: str = PACKED_ACROSS  # how rows are made: packed-sentences or packed-across-documents
    next_sentence: ClassVar[bool] = False
    sentence_order: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if self.layout not in (PACKED, PACKED_ACROSS):
            raise ValueError(
                f"objective.layout={self.layout!r} has no global tokens: use {PACKED!r} or {PACKED_ACROSS!r}"
            )

    def rows(self, phase):
        return SentenceGlobals(phase.length, self.masking, self.layout == PACKED_ACROSS, phase.globals)
