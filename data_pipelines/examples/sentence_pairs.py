"""Pairs of natural sentences with next-sentence prediction, [CLS] A [SEP] B [SEP]: RoBERTa's SENTENCE-PAIR+NSP (Liu et
al. 2019, section 4.2).

A and B are one sentence each: every second sentence of a document and the one after it (label 0), or in half of the
rows, and where a document's last one has none after it, one of another document at random (label 1). Rows hold far
fewer tokens than segment pairs; the paper takes more of them, so that a batch has as many tokens.
"""

from dataclasses import dataclass

import numpy as np

from data_pipelines.examples.segment_pairs import SegmentPairs


@dataclass(frozen=True)
class SentencePairs(SegmentPairs):
    """Masked pairs of sentences, as `SegmentPairs` with chunks of two sentences and random Bs of one.

    A sentence longer than the row is cut into pieces of half a row, which count as sentences; two that are longer
    together lose tokens as segments do.
    """

    def _targets(self, key, units):
        """So that a random B ends with its first sentence."""
        return np.zeros(len(units), np.int64)

    def _chunk_ends(self, key, units, documents):
        """The unit after a chunk beginning at each unit: the second one, or the document's end."""
        return np.minimum(np.arange(len(units) - 1) + 2, np.repeat(documents[1:], np.diff(documents)))
