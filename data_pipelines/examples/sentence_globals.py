"""Packed sentences with global tokens beside each row, one for each of its sentences (Ainslie et al. 2020,
arXiv:2004.08483: the global input summarises the sentences of the long one).

Where a corpus has no sentences, a document is one: what is longer than LONGEST tokens is cut into pieces of PIECE, of
which 256 global tokens summarise the 4,096 tokens of BigBird-ETC.
"""

from dataclasses import dataclass

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.examples import chunks
from data_pipelines.examples.layout import Chosen, Feature
from data_pipelines.examples.packed_sentences import PackedSentences, Plan

LONGEST, PIECE = 128, 16


@dataclass(frozen=True)
class SentenceGlobals(PackedSentences):
    """Rows of `PackedSentences`, and which global token each token belongs to.

    global_of: int32 [length], the number, in the row, of the sentence that a token is in ([CLS] is in the first, a
    [SEP] in the one before it), -1 at padding and in sentences after the first `globals`. global_segments: int32
    [globals], the segment in which each such sentence begins, 0 for global tokens without one.

    Raises UserError for more global tokens than the row has tokens.
    """

    globals: int = 256

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.globals <= self.length:
            raise UserError(
                f"globals={self.globals} with length={self.length}: must be from 1 to {self.length}, for each "
                "summarises a sentence of the row (BigBird: 256 for 4096)"
            )

    @property
    def spec(self) -> dict[str, Feature]:
        return super().spec | {"global_of": Feature((self.length,)), "global_segments": Feature((self.globals,))}

    def plan(self, part, split: str, seed: int) -> Plan:
        pieces = chunks.units(part.sentences(split), longest=min(LONGEST, self.length - 2), piece=PIECE)
        return super().plan(part, split, seed)._replace(pieces=pieces)

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        frame = self.frame(chosen)
        batch = self.filled(chosen, keys, frame)
        (begins,) = chosen.gather(self._begins)
        marks = np.zeros(frame.real.shape, bool)
        marks[frame.text] = begins[frame.stretch]
        marks[:, 0] = True
        number = np.cumsum(marks, axis=1, dtype=np.int32) - 1
        named = frame.real & (number < self.globals)
        row, column = np.nonzero(marks & named)
        segments = np.zeros((len(marks), self.globals), np.int32)
        segments[row, number[row, column]] = batch["segments"][row, column]
        return batch | {"global_of": np.where(named, number, -1).astype(np.int32), "global_segments": segments}

    def _begins(self, plan: Plan, _, example: np.ndarray) -> tuple[np.ndarray]:
        """Which tokens of each row's text begin a sentence, but the first: bool [n, length]."""
        start, end = plan.starts[example], plan.starts[example + 1]
        first = np.searchsorted(plan.pieces, start, "right")
        count = np.searchsorted(plan.pieces, end) - first
        row, rank = chunks.ranks(count)
        begins = np.zeros((len(example), self.length), bool)
        begins[row, plan.pieces[first[row] + rank] - start[row]] = True
        return (begins,)
