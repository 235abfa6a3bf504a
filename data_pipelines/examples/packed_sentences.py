"""Full sentences packed across documents, [CLS] sentences [SEP] the next document's sentences [SEP] ...,
planned by index.

RoBERTa's FULL-SENTENCES (Liu et al. 2019, section 4.2): a row takes sentences in corpus order until no more
whole one fits; a [SEP] closes each document in it, and the row. A sentence longer than the row is cut. In its
DOC-SENTENCES a row ends with its document, too: the last of each is shorter and filled up with padding. The paper then
takes more rows, so that a batch has as many tokens; here a batch has as many rows as the phase says.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines.examples import chunks
from data_pipelines.examples.layout import Chosen
from data_pipelines.examples.masked_rows import MaskedRows
from data_pipelines.examples.masking import SpecialTokens


class Plan(NamedTuple):
    """documents: where they begin in the part, then its end. starts: where rows begin, then the end. inner, inners: of
    the documents that begin inside each row, the first and how many. pieces: where what a row's global tokens stand
    for begins, None without them. All int64, in tokens."""

    part: Any
    split: str
    special: SpecialTokens
    documents: np.ndarray
    starts: np.ndarray
    inner: np.ndarray
    inners: np.ndarray
    pieces: np.ndarray | None = None

    @property
    def number(self) -> int:
        """Examples per epoch."""
        return len(self.starts) - 1


class Frame(NamedTuple):
    """Where the text of rows lies: [CLS] text [SEP] text ... [SEP].

    start, size: int64 [n], the tokens of each row in its part. row, separator: int64 [separators], row and column of
    each [SEP] between documents. real, text: bool [n, length], what is no padding, and no special token either.
    """

    start: np.ndarray
    size: np.ndarray
    row: np.ndarray
    separator: np.ndarray
    real: np.ndarray
    text: np.ndarray

    @property
    def stretch(self) -> np.ndarray:
        """bool [n, length]: the text of each row in a read of `length` tokens from its start, in order."""
        return np.arange(self.real.shape[1]) < self.size[:, None]


@dataclass(frozen=True)
class PackedSentences(MaskedRows):
    """Masked rows of packed sentences; in an epoch every token comes exactly once.

    In a batch types are 0, and segments number the documents in the row from 1 ([CLS] belongs to the first, a [SEP] to
    the document that it closes), 0 is padding: attention stays within a segment. With cross_document_attention all real
    tokens are in segment 1.

    one_document: whether a row ends with its document.
    """

    least = 3

    cross_document_attention: bool = False
    one_document: bool = False

    def plan(self, part, split: str, seed: int) -> Plan:
        sentences, length = part.sentences(split), self.length
        documents = chunks.document_starts(part, split)
        units = chunks.units(sentences, longest=length - 2, piece=length - 2)
        ends = _row_ends(units, documents, length)
        if self.one_document:
            ends = np.minimum(ends, np.searchsorted(units, documents)[np.searchsorted(documents, units[:-1], "right")])
        starts = units[chunks.follow(ends)]
        inner = np.searchsorted(documents, starts[:-1], "right")
        inners = np.searchsorted(documents, starts[1:]) - inner
        return Plan(part, split, SpecialTokens.of(part.corpus), documents, starts, inner, inners)

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        return self.filled(chosen, keys, self.frame(chosen))

    def frame(self, chosen: Chosen) -> Frame:
        """Where text lies in the rows of examples."""
        start, size, inners = chosen.gather(_stretches)
        rows, separators = [], []
        for plan, of, example in chosen.groups:
            row, rank = chunks.ranks(plan.inners[example])
            rows.append(np.arange(len(start))[of][row])
            separators.append(1 + plan.documents[plan.inner[example][row] + rank] - plan.starts[example][row] + rank)
        row, separator = np.concatenate(rows), np.concatenate(separators)
        end = size + 2 + inners
        real = np.arange(self.length, dtype=np.int32) < end[:, None]
        text = real.copy()
        text[:, 0] = text[row, separator] = text[np.arange(len(end)), end - 1] = False
        return Frame(start, size, row, separator, real, text)

    def filled(self, chosen: Chosen, keys: np.ndarray, frame: Frame) -> dict[str, np.ndarray]:
        """Rows with their text, masked."""
        special, text, stretch = chosen.plans[0].special, frame.text, frame.stretch

        def read(field, beside):
            beside[text] = chosen.read(field, frame.start, self.length)[stretch]
            return beside

        tokens = np.where(frame.real, np.int32(special.sep), np.int32(special.pad))
        tokens[:, 0] = special.cls
        masked = self.masked(read("tokens", tokens), special, keys, text, frame.size, lambda field: read(field, ~text))
        segments = frame.real.astype(np.int32)
        if not self.cross_document_attention:
            begins = np.zeros(tokens.shape, bool)
            begins[:, 0] = begins[frame.row, frame.separator + 1] = True
            segments *= np.cumsum(begins, axis=1, dtype=np.int32)
        return {"tokens": tokens, "types": np.zeros_like(tokens), "segments": segments} | masked


def _stretches(plan, _, example):
    """Where rows begin, their tokens, and the documents that begin inside: int64 [n] each."""
    start = plan.starts[example]
    return start, plan.starts[example + 1] - start, plan.inners[example]


def _row_ends(units, documents, length):
    """The unit after a row beginning at each unit: int64 [units]. documents: where they begin, in tokens."""
    begin = units[:-1]
    document = np.searchsorted(documents, begin, "right")
    # A row's cost is its tokens and one [SEP] per document: a difference of sums that never fall along the corpus
    cost = units[1:] + document
    return np.searchsorted(cost, begin + document + length - 2, "right")
