"""Rows of up to three turns of a dialogue, [CLS] A [SEP] B [SEP] C [SEP], as in ERNIE's dialogue language model (Sun et
al. 2019, arXiv:1904.09223, section 4.3), planned by index.

A dialogue is a document, and a turn is what its adjacent sentences of one segment make up. Rows begin at every second
turn that has one after it, so the third turn of a row begins the next. In half of the rows a turn is replaced by a
random one of another dialogue; the label says so. A row that is too long loses the ends of its longest turns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError
from data_pipelines.examples import chunks
from data_pipelines.examples.layout import Chosen
from data_pipelines.examples.masking import SEGMENTS, SpecialTokens
from data_pipelines.examples.segment_pairs import SENTENCE_ORDER, Segmented
from data_pipelines.formats.dialogue import NAMES

TURNS = 3  # in a row, at most
COIN, PLACE, DIALOGUE, TURN = range(4)  # draws per row, in the stream SEGMENTS


class Plan(NamedTuple):
    """turns: where turns begin, in tokens, then the end. dialogues: the turns that begin them, then the number of
    turns. of, begin: the dialogue and the first turn of each example. All int64."""

    part: Any
    split: str
    special: SpecialTokens
    turns: np.ndarray
    dialogues: np.ndarray
    of: np.ndarray
    begin: np.ndarray
    number: int  # examples per epoch


@dataclass(frozen=True)
class Dialogues(Segmented):
    """Masked turns of dialogues. The label is 0 if all turns are of one dialogue, 1 if one is of another; a part of a
    single dialogue has none."""

    least = 1 + 2 * TURNS

    def __post_init__(self):
        super().__post_init__()
        if self.label == SENTENCE_ORDER:
            raise UserError("sentence_order=True: turns of dialogues have no such label; set it to False")

    def check(self, corpus):
        super().check(corpus)
        segments = corpus.fields["segments"].values if "segments" in corpus.fields else ("text",)
        if {*segments} != {*NAMES}:
            found = f"has documents of {', '.join(segments)}, not the turns of dialogues"
            cure = "prepare it with --source dialogue:FILE"
            raise UserError(f"objective.layout='dialogues': corpus {corpus.path} {found}; {cure}")

    def plan(self, part, split: str, seed: int) -> Plan:
        sentences, documents = part.sentences(split), part.documents(split)
        of_sentences = part.column(split, "segments")
        begins = np.diff(of_sentences, prepend=-1) != 0
        begins[documents[:-1]] = True
        first = np.flatnonzero(begins)
        turns, dialogues = sentences[np.append(first, len(begins))], np.searchsorted(first, documents)
        of, rank = chunks.ranks(np.diff(dialogues) // 2)
        begin = dialogues[of] + 2 * rank
        return Plan(part, split, SpecialTokens.of(part.corpus), turns, dialogues, of, begin, len(of))

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        draws = noise.bits(keys, noise.counters(SEGMENTS, 4))
        start, size, label = chosen.gather(lambda plan, rows, example: self._turns(plan, draws[rows], example))
        size = np.minimum(size, _cap(size, self.length - 1 - np.count_nonzero(size, axis=1))[:, None])
        return self.laid_out(chosen, keys, start, size) | ({self.label: label} if self.label else {})

    def _turns(self, plan, draws, example):
        """Return where turns begin and their sizes (int64 [n, 3], in tokens; size 0: no third turn), and the labels."""
        of, begin, number = plan.of[example], plan.begin[example], len(plan.dialogues) - 1
        there = begin[:, None] + np.arange(TURNS)
        count = np.minimum(plan.dialogues[of + 1] - begin, TURNS)
        label = np.full(len(of), -1, np.int32)
        if self.label and number > 1:
            rows = np.flatnonzero(draws[:, COIN] < 1 << 31)
            other = (of[rows] + 1 + noise.below(draws[rows, DIALOGUE], np.full(len(rows), number - 1))) % number
            of_other = np.diff(plan.dialogues)[other]
            turn = plan.dialogues[other] + noise.below(draws[rows, TURN], of_other)
            there[rows, noise.below(draws[rows, PLACE], count[rows])] = turn
            label[:] = 0
            label[rows] = 1
        real = np.arange(TURNS) < count[:, None]
        there = np.where(real, there, 0)
        return plan.turns[there], (plan.turns[there + 1] - plan.turns[there]) * real, label


def _cap(size: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the largest size of a turn with which the turns of each row fit: int64 [n]. size: int64 [n, 3]."""
    shorter = np.sort(size, axis=1)
    return np.maximum.reduce([room // 3, (room - shorter[:, 0]) // 2, room - shorter[:, 0] - shorter[:, 1]])
