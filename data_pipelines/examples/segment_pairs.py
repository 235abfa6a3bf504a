"""Pairs of segments, [CLS] A [SEP] B [SEP], as in BERT (Devlin et al. 2019, appendix A.2), planned by index.

A chunk is a run of whole sentences of one document that reaches a target length: the row's room or, for 10% of the
chunks, a length drawn uniformly from 2 up to it. The run is split in two between sentences. With next-sentence
prediction half of the rows keep the second part as B (label 0); in the other half B begins at a random sentence of
another document (label 1). With sentence-order prediction (ALBERT, Lan et al. 2019, section 3.1) the other half has the
two parts exchanged (label 1, as in Hugging Face). A pair too long loses tokens at both ends, the longer segment first.

Two things differ from BERT's own data. First, every epoch draws anew which half a row is in, its split and its random B
(BERT stored ten fixed copies), so sentences that a random B displaces are seen in other epochs, not handed to the next
chunk. Second, a sentence longer than the row is cut into pieces that count as sentences, where BERT lost the rest of
it. One thing differs from ALBERT's: a chunk of one sentence has no order and no label, where its code took a random B
and called that exchanged. As in ALBERT's data, lengths reveal a little: a chunk ends with the sentence that reaches its
target, mostly a long one, so the later part is the longer one (in 54% of WikiText-2's pairs at length 128, 56% at 32).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.examples import chunks
from data_pipelines.examples.layout import Chosen, Feature
from data_pipelines.examples.masking import SEGMENTS, MaskedRows, SpecialTokens

SHORT = 0.1  # share of chunks that are short on purpose, so that the model sees all lengths
COIN, SPLIT, DOCUMENT, SENTENCE, TRIM = range(5)  # draws per row, in the stream SEGMENTS; TRIM is the first of several
NEXT_SENTENCE, SENTENCE_ORDER = "next_sentence", "sentence_order"  # the labels of pairs


class Plan(NamedTuple):
    """units: where sentences begin, in tokens, then the end. documents, chunks: the units that begin them, then the
    number of units. of: the document of each chunk. All int64. key: of the chunks' target lengths."""

    part: Any
    split: str
    special: SpecialTokens
    key: int
    units: np.ndarray
    documents: np.ndarray
    chunks: np.ndarray
    of: np.ndarray
    number: int  # examples per epoch


@dataclass(frozen=True)
class Segmented(MaskedRows):
    """Base of masked rows of several segments, [CLS] A [SEP] B [SEP] ... In a batch types number the segments from 0;
    segments are 1, and 0 at padding. label: the name of the rows' label, which is -1 in a row without one."""

    label: str | None = NEXT_SENTENCE

    @property
    def spec(self) -> dict[str, Feature]:
        return super().spec | ({self.label: Feature((), fill=-1)} if self.label else {})

    def laid_out(self, chosen: Chosen, keys: np.ndarray, start: np.ndarray, size: np.ndarray) -> dict[str, np.ndarray]:
        """Return the row arrays, masked. start, size: int64 [n, segments], in tokens; those of size 0 are not there."""
        there = size > 0
        ends = (1 + np.cumsum(size + there, axis=1)).astype(np.int32)  # after each segment's [SEP]
        begins = np.concatenate([np.ones_like(ends[:, :1]), ends[:, :-1]], axis=1)
        column = np.arange(self.length, dtype=np.int32)
        real = column < ends[:, -1:]
        types = sum((column >= begin[:, None]).astype(np.int32) for begin in begins.T[1:]) * real
        row, separators = np.arange(len(keys))[:, None], np.where(there, ends - 1, 0)
        maskable = real.copy()
        maskable[row, separators] = maskable[:, 0] = False

        def read(field):  # stretches aligned with their places in the row, so no index per token
            values = chosen.read(field, start[:, 0] - 1, self.length)
            for segment in range(1, start.shape[1]):
                of_segment = chosen.read(field, start[:, segment] - begins[:, segment], self.length)
                np.copyto(values, of_segment, where=types == segment)
            return values

        special = chosen.plans[0].special
        tokens = read("tokens").astype(np.int32)
        np.copyto(tokens, special.pad, where=~real)
        tokens[row, separators] = special.sep
        tokens[:, 0] = special.cls
        starts = lambda field: read(field) | ~maskable
        masked = self.masked(tokens, special, keys, maskable, size.sum(axis=1), starts)
        return {"tokens": tokens, "types": types, "segments": real.astype(np.int32)} | masked


@dataclass(frozen=True)
class SegmentPairs(Segmented):
    """Masked segment pairs. The label is 0 if B follows A; 1 if B is random (NEXT_SENTENCE) or A follows B
    (SENTENCE_ORDER). For NEXT_SENTENCE, a chunk of one sentence gets a random B of the same part, as in BERT. With
    another label, none, or a single document it stands alone, as [CLS] A [SEP], without a label."""

    least = 5

    @property
    def _room(self):
        return self.length - 3

    def plan(self, part, split: str, seed: int) -> Plan:
        sentences, key = part.sentences(split), noise.key(seed)
        # Pieces of half a row, so that a corpus without sentence boundaries makes pairs too
        units = chunks.units(sentences, longest=self._room, piece=-(-self._room // 2))
        documents = np.searchsorted(units, chunks.document_starts(part, split))
        ends = np.minimum(self._chunk_ends(key, units), np.repeat(documents[1:], np.diff(documents)))
        followed = chunks.follow(ends)
        of = np.searchsorted(documents, followed[:-1], "right") - 1
        return Plan(part, split, SpecialTokens.of(part.corpus), key, units, documents, followed, of, len(of))

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        trims = -(-self.length // 32)
        draws = noise.bits(keys, noise.counters(SEGMENTS, TRIM + 2 * trims))
        start, size, label = self._segments(chosen, draws)
        start, size = truncated(start, size, self._room, draws[:, TRIM:].reshape(-1, 2, trims))
        made = self.laid_out(chosen, keys, start, size)
        return made | self._added(made, draws, label)

    def _added(self, made, draws, label):
        """Return further arrays of a batch, or others in place of those made."""
        return {self.label: label} if self.label else {}

    def _targets(self, key, units):
        """Return the length that a chunk beginning at each unit aims for: int64 [n]. key: one, or uint64 [n]."""
        draw = noise.each(key, units.astype(np.uint32))
        short = round(SHORT * 2**32)
        return np.where(draw < short, 2 + draw * np.int64(self._room - 1) // short, self._room)

    def _chunk_ends(self, key, units):
        """Return the unit after a chunk that begins at each unit: where its target is reached in its document."""
        begin = units[:-1]
        return np.searchsorted(units, begin + self._targets(key, np.arange(len(begin))))

    def _segments(self, chosen, draws):
        """Return segments A and B before truncation (start and size, int64 [n, 2], in tokens) and the label, int32 [n].
        Plans are called as rarely as possible: a batch has rows of many plans, a few of each."""
        first, last, document, documents, key = chosen.gather(_chunks)
        split = first + 1 + noise.below(draws[:, SPLIT], np.maximum(last - first - 1, 1))
        units = np.stack([first, split, last], 1)
        (borders,) = chosen.gather(lambda plan, rows, _: (plan.units[units[rows]],))
        start, end = borders[:, :2].copy(), borders[:, 1:].copy()
        alone = split == last
        label = np.where(alone, np.int32(-1), np.int32(0))
        heads = draws[:, COIN] < 1 << 31
        if self.label == SENTENCE_ORDER:
            # Before the cut, which leaves the first of two long segments a token more: that must not reveal the order
            rows = np.flatnonzero(heads & ~alone)
            start[rows], end[rows], label[rows] = start[rows, ::-1], end[rows, ::-1], 1
        if self.label == NEXT_SENTENCE:
            rows = np.flatnonzero((heads | alone) & (documents > 1))
            others = (document + 1 + noise.below(draws[:, DOCUMENT], documents - 1)) % documents
            wanted = np.maximum(self._targets(key, first) - (end[:, 0] - start[:, 0]), 1)

            def elsewhere(plan, rows, _):
                begin, stop = plan.documents[others[rows]], plan.documents[others[rows] + 1]
                begin += noise.below(draws[rows, SENTENCE], stop - begin)
                start = plan.units[begin]
                return start, np.minimum(plan.units[stop], self._reached(plan.units, begin, start + wanted[rows]))

            starts, ends = chosen.gather(elsewhere)
            start[rows, 1], end[rows, 1], label[rows] = starts[rows], ends[rows], 1
        return start, end - start, label

    def _reached(self, units, unit, goal):
        """Return the first boundary after each unit at or beyond a goal, at most `length` tokens away: int64 [n]. Steps
        of halving size stay near the unit: a binary search over a large corpus misses the cache."""
        last = len(units) - 1
        for step in reversed(range(self.length.bit_length())):
            ahead = np.minimum(unit + (1 << step), last)
            unit = np.where(units[ahead] < goal, ahead, unit)
        return units[np.minimum(unit + 1, last)]


@dataclass(frozen=True)
class SentencePairs(SegmentPairs):
    """Masked pairs of natural sentences: RoBERTa's SENTENCE-PAIR+NSP (Liu et al. 2019, section 4.2).

    A and B are one sentence each: every second sentence of a document and the one after it. In half of the rows, and if
    a document's last sentence has none after it, B is a random sentence of another document. Rows hold far fewer tokens
    than segment pairs; the paper takes more rows, so that a batch has as many tokens. A sentence longer than the row is
    cut into pieces of half a row, which count as sentences. A pair that is too long loses tokens as segments do.
    """

    def _targets(self, key, units):
        """0, so that a random B ends with its first sentence."""
        return np.zeros(len(units), np.int64)

    def _chunk_ends(self, key, units):
        """Return the unit after the second sentence."""
        return np.arange(len(units) - 1) + 2


def _chunks(plan, _, example):
    """Return each example's first unit, the unit after its last, its document, the number of these, the plan's key."""
    document, same = plan.of[example], np.ones(len(example), np.int64)
    documents, key = same * (len(plan.documents) - 1), np.full(len(example), plan.key, np.uint64)
    return plan.chunks[example], plan.chunks[example + 1], document, documents, key


def truncated(start: np.ndarray, size: np.ndarray, room: int, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut pairs to a row's room: each token too many leaves the longer segment, at its front or back by a coin.
    start, size: int64 [n, 2], the segments in tokens. bits: uint32 [n, 2, words], the coins: a segment may lose up to
    32 * words tokens. Returns the new start and size."""
    # The result of BERT's loop "drop a token of A if A is longer, else one of B"
    kept_b = np.minimum(size[:, 1], np.maximum(room - size[:, 0], room // 2))
    kept = np.stack([np.minimum(size[:, 0], room - kept_b), kept_b], 1)
    tosses = (size - kept)[:, :, None] - np.arange(0, 32 * bits.shape[2], 32)
    coins = (1 << np.minimum(np.maximum(tosses, 0), 32)) - 1  # that many low bits
    front = np.bitwise_count(bits & coins).sum(axis=2, dtype=np.int64)
    return start + front, kept
