"""Masked language modelling in which each phase masks units of its own, as ERNIE's stages mask tokens, phrases and
entities (Sun et al. 2019, arXiv:1904.09223, section 4.2)."""

import dataclasses
from typing import ClassVar

from data_pipelines.examples.masking import TOKEN
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Phase


@dataclasses.dataclass(frozen=True)
class UnitPhase(Phase):
    """A phase with a unit of masking."""

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
            raise ValueError(
                f"objective.masking.unit={self.masking.unit!r}: each phase has its own; give phases.0.unit"
            )

    def rows(self, phase):
        return dataclasses.replace(super().rows(phase), masks=dataclasses.replace(self.masking, unit=phase.unit))
