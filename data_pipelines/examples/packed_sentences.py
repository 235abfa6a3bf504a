"""Full sentences packed across documents, [CLS] sentences [SEP] the next document's sentences [SEP], planned by index.

RoBERTa's FULL-SENTENCES (Liu et al. 2019, section 4.2): a row takes sentences in corpus order until the next one does
not fit; a [SEP] closes each document in it, and the row. A sentence longer than the row is cut. In its DOC-SENTENCES a
row also ends with its document; a document's last row is padded. The paper then takes more rows, so that a batch has as
many tokens; here a batch has as many rows as the phase says.

Full rows, as those of ModernBERT (Warner et al. 2024, section 2.2), cut documents where a row ends.
"""

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.examples import chunks
from data_pipelines.examples.layout import Chosen, Feature
from data_pipelines.examples.masking import MaskedRows, SpecialTokens

LONGEST, PIECE = 128, 16  # tokens: longer sentences are cut into pieces, which have a global token each


class Plan(NamedTuple):
    """documents: where they begin in the part, then its end. starts: where rows begin, then the end. inner, inners: the
    first document that begins inside each row, and how many do. pieces: where the sentences of global tokens begin,
    None without global tokens. All int64, in tokens."""

    part: Any
    split: str
    special: SpecialTokens
    documents: np.ndarray
    starts: np.ndarray
    inner: np.ndarray
    inners: np.ndarray
    number: int  # examples per epoch
    pieces: np.ndarray | None = None


class Frame(NamedTuple):
    """Where the text of rows lies: [CLS] text [SEP] text ... [SEP].   start, size: int64 [n], the first token of each
    row in its part, and its number of tokens. row, separator: int64 [separators], row and column of each [SEP] between
    documents. real: bool [n, length], no padding. text: bool [n, length], neither padding nor special tokens."""

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

    In a batch types are 0. Segments number the documents in the row from 1, with [CLS] in the first and a [SEP] in the
    one that it closes, and are 0 at padding. With cross_document_attention all real tokens are in segment 1.

    one_document: whether a row ends with its document.   cut: whether documents are cut so that rows are full; the last
    token of a row is padding where a document would end just after it.
    """

    least = 3

    cross_document_attention: bool = False
    one_document: bool = False
    cut: bool = False

    def plan(self, part, split: str, seed: int) -> Plan:
        documents, special = chunks.document_starts(part, split), SpecialTokens.of(part.corpus)
        starts = _filled(documents, self.length) if self.cut else self._of_sentences(part.sentences(split), documents)
        inner = np.searchsorted(documents, starts[:-1], "right")
        inners = np.searchsorted(documents, starts[1:]) - inner
        return Plan(part, split, special, documents, starts, inner, inners, len(inner))

    def _of_sentences(self, sentences: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return where rows of whole sentences begin, then the end: int64, in tokens."""
        length = self.length
        units = chunks.units(sentences, longest=length - 2, piece=length - 2)
        ends = _row_ends(units, documents, length)
        if self.one_document:
            ends = np.minimum(ends, np.searchsorted(units, documents)[np.searchsorted(documents, units[:-1], "right")])
        return units[chunks.follow(ends)]

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        return self.filled(chosen, keys, self.frame(chosen))

    def frame(self, chosen: Chosen) -> Frame:
        """Return where text lies in the rows of examples."""
        start, size, inners = chosen.gather(_stretches)
        rows, separators = [], []
        for plan, index, example in chosen.groups:
            row, rank = chunks.ranks(plan.inners[example])
            rows.append(np.arange(len(start))[index][row])
            separators.append(1 + plan.documents[plan.inner[example][row] + rank] - plan.starts[example][row] + rank)
        row, separator = np.concatenate(rows), np.concatenate(separators)
        end = size + 2 + inners
        real = np.arange(self.length, dtype=np.int32) < end[:, None]
        text = real.copy()
        text[:, 0] = text[row, separator] = text[np.arange(len(end)), end - 1] = False
        return Frame(start, size, row, separator, real, text)

    def filled(self, chosen: Chosen, keys: np.ndarray, frame: Frame) -> dict[str, np.ndarray]:
        """Return rows with their text, masked."""
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


@dataclass(frozen=True)
class SentenceGlobals(PackedSentences):
    """Rows of `PackedSentences` with a global token for each of their sentences, and the sentence that each token
    belongs to (Ainslie et al. 2020, arXiv:2004.08483: the global input summarises the sentences of the long one).

    In a corpus without sentences, a document is a sentence. Sentences longer than LONGEST tokens are cut into pieces of
    PIECE tokens, of which 256 global tokens summarise the 4,096 tokens of BigBird-ETC.

    global_of: int32 [length], the number, in the row, of each token's sentence ([CLS] is in the first, a [SEP] in the
    one before it), -1 at padding and in sentences after the first `globals`. global_segments: int32 [globals], the
    segment in which each such sentence begins, 0 for global tokens without a sentence.

    Raises UserError for more global tokens than the row has tokens.
    """

    globals: int = 256

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.globals <= self.length:
            raise UserError(f"globals={self.globals} with length={self.length}: must be from 1 to {self.length}")

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
        """Return which tokens of each row's text begin a sentence other than the first: bool [n, length]."""
        start, end = plan.starts[example], plan.starts[example + 1]
        first = np.searchsorted(plan.pieces, start, "right")
        count = np.searchsorted(plan.pieces, end) - first
        row, rank = chunks.ranks(count)
        begins = np.zeros((len(example), self.length), bool)
        begins[row, plan.pieces[first[row] + rank] - start[row]] = True
        return (begins,)


def _stretches(plan, _, example):
    """Return where rows begin, their tokens, and the number of documents that begin inside: int64 [n] each."""
    start = plan.starts[example]
    return start, plan.starts[example + 1] - start, plan.inners[example]


def _filled(documents: np.ndarray, length: int) -> np.ndarray:
    """Return where full rows begin, then the end: int64, in tokens. documents: as in `Plan`."""
    total, starts, inner = int(documents[-1]), array("q", [0]), 1
    documents = memoryview(documents)  # indexing it is several times faster than indexing an array
    while starts[-1] < total:
        end = starts[-1] + length - 2
        while documents[inner] < min(end, total):  # a [SEP] closes a document inside the row
            inner, end = inner + 1, end - 1
        inner += documents[inner] == end < total
        starts.append(min(end, total))
    return np.array(starts, np.int64)


def _row_ends(units, documents, length):
    """Return the unit after a row that begins at each unit: int64 [units]. documents: where they begin, in tokens."""
    begin = units[:-1]
    document = np.searchsorted(documents, begin, "right")
    # A row's cost is its tokens and one [SEP] per document: a difference of sums that never decrease along the corpus
    cost = units[1:] + document
    return np.searchsorted(cost, begin + document + length - 2, "right")
