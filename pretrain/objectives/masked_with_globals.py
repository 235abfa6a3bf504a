"""Masked language modelling of rows with global tokens beside them (BigBird-ETC: Zaheer et al. 2020, section 2)."""

import dataclasses
from typing import ClassVar

from data_pipelines.examples.packed_sentences import SentenceGlobals
from pretrain.objectives.layouts import ONE_DOCUMENT, PACKED, PACKED_ACROSS
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.phase import Phase

PACKED_AS = {PACKED: {}, PACKED_ACROSS: {"cross_document_attention": True}, ONE_DOCUMENT: {"one_document": True}}


@dataclasses.dataclass(frozen=True)
class GlobalPhase(Phase):
    """Rows with global tokens, each of which stands for a sentence of the row."""

    globals: int = 256  # global tokens beside each row

    def __str__(self) -> str:
        return f"{super().__str__()} and {self.globals} global ones"


@dataclasses.dataclass(frozen=True)
class MaskedWithGlobals(MaskedLanguageModel):
    """Tokens of the row are predicted; of ETC's objectives without the one of global tokens (CPC), an option there."""

    phase: ClassVar[type[Phase]] = GlobalPhase
    # How rows are made: packed-sentences, packed-across-documents or document-sentences
    layout: str = PACKED_ACROSS
    next_sentence: ClassVar[bool] = False
    sentence_order: ClassVar[bool] = False
    globals: ClassVar[int] = 0  # of the row's own tokens

    def __post_init__(self):
        super().__post_init__()
        if self.layout not in PACKED_AS:
            raise ValueError(f"objective.layout={self.layout!r} has no global tokens: use {' or '.join(PACKED_AS)}")

    def rows(self, phase):
        return SentenceGlobals(phase.length, self.masking, globals=phase.globals, **PACKED_AS[self.layout])
