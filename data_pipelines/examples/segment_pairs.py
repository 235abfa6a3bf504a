"""Pairs of segments, [CLS] A [SEP] B [SEP], as in BERT (Devlin et al. 2019, appendix A.2), planned by index.

A chunk is a run of whole sentences of one document that reaches a target length: the row's room, or for 10%
of the chunks a length drawn uniformly from 2 up to it. The run is split in two between sentences. With
next-sentence prediction half of the rows keep the second part as B (label 0); in the other half B begins at a
random sentence of another document (label 1). What is too long loses tokens at both ends, from the longer
segment first.

Two things differ from BERT's own data. Which half a row is in, its split and its random B are drawn again in
every epoch (BERT stored ten fixed copies), so sentences that a random B displaces are seen in other epochs,
not handed to the next chunk. And a sentence longer than the row is cut into pieces that count as sentences,
where BERT lost the rest of it.
"""

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError
from data_pipelines.examples import chunks, masking
from data_pipelines.order import schedule

SHORT = 0.1  # share of the chunks that are short on purpose, so that the model sees rows of every length
COIN, SPLIT, DOCUMENT, SENTENCE = range(4)  # draws per row, in the stream masking.LAYOUT
TRIM_A, TRIM_B = masking.LAYOUT + 1, masking.LAYOUT + 2  # streams


def spec(length, masks, next_sentence=True):
    """Shapes (without the batch) and dtypes of a batch's arrays: name -> (shape, dtype)."""
    label = {"next_sentence": ((), np.int32)} if next_sentence else {}
    return masking.spec(length, masks) | label


class SegmentPairs:
    """Masked segment pairs from one split of a corpus.

    A batch holds tokens, types (1 in B [SEP], else 0), segments (1, and 0 at padding), the prediction arrays
    of `masking.mask`, and with next_sentence the label next_sentence: 0 where B follows A, 1 where it is
    random. A chunk of one sentence gets a random B, as in BERT. Where there is none to get (next_sentence
    off, or a single document) it stands alone, as [CLS] A [SEP] with label -1: no label.

    corpus: Corpus. split: 'train' or 'heldout'. length: tokens per row. batch_size: rows of the global batch.
    masks: Masking. Raises UserError for a length below 5 or a corpus without the special tokens.
    """

    def __init__(self, corpus, split, length, batch_size, seed, masks=masking.BERT, next_sentence=True):
        if length < 5:
            raise UserError(f"length {length} leaves no room for two segments; use at least 5")
        self.corpus, self.split, self.length = corpus, split, length
        self.batch_size, self.seed = batch_size, seed
        self.masks, self.next_sentence = masks, next_sentence
        self.spec = spec(length, masks, next_sentence)
        self._special = masking.SpecialTokens.of(corpus)
        self._room = length - 3
        sentences = corpus.sentences(split)
        # Pieces of half a row, so that a corpus without sentence boundaries makes pairs too
        self._units = chunks.units(sentences, longest=self._room, piece=-(-self._room // 2))
        starts = chunks.document_starts(sentences, corpus.documents(split))
        self._documents = np.searchsorted(self._units, starts)
        self._target_keys = noise.keys(seed, 0), noise.keys(seed, 1)
        self._chunks = chunks.follow(self._chunk_ends())

    @property
    def number(self):
        """Examples per epoch."""
        return len(self._chunks) - 1

    def batch(self, step, rows):
        """Some rows (int64 [n]) of a step's global batch: name -> array [n, ...]."""
        return self.build(*schedule(self, step, rows))

    def build(self, epoch, example):
        """The examples (int64 [n], below `number`) as they look in an epoch (integer or int64 [n]): name ->
        array."""
        keys = noise.keys(self.seed, epoch, example)
        a, b, label = self._segments(keys, example)
        a, b = self._truncated(keys, a, b)
        arrays = self._laid_out(keys, a, b)
        if self.next_sentence:
            arrays["next_sentence"] = label
        return arrays

    def _targets(self, units):
        """The length that a chunk beginning at each unit aims for: int64, of units' shape."""
        counters = units.astype(np.uint32)
        short = noise.bits(self._target_keys[0], counters) < round(SHORT * 2**32)
        drawn = 2 + noise.below(noise.bits(self._target_keys[1], counters), self._room - 1)
        return np.where(short, drawn, self._room)

    def _chunk_ends(self):
        """The unit after a chunk beginning at each unit: the first at which the target is reached, or the
        document's end."""
        begin = self._units[:-1]
        reached = np.searchsorted(self._units, begin + self._targets(np.arange(len(begin))))
        return np.minimum(reached, np.repeat(self._documents[1:], np.diff(self._documents)))

    def _segments(self, keys, example):
        """Token ranges A and B, each (start, size) as int64 [n], and the label, int32 [n]."""
        draws = noise.bits(keys[:, None], noise.counters(masking.LAYOUT, 4))
        first, last = self._chunks[example], self._chunks[example + 1]
        split = first + 1 + noise.below(draws[:, SPLIT], np.maximum(last - first - 1, 1))
        a_start, b_start, b_end = self._units[first], self._units[split], self._units[last]
        a_size = b_start - a_start
        label = np.where(split == last, -1, 0)
        documents = len(self._documents) - 1
        if self.next_sentence and documents > 1:
            random = (draws[:, COIN] < 1 << 31) | (split == last)
            document = np.searchsorted(self._documents, first, "right") - 1
            other = (document + 1 + noise.below(draws[:, DOCUMENT], documents - 1)) % documents
            begin, end = self._documents[other], self._documents[other + 1]
            begin = begin + noise.below(draws[:, SENTENCE], end - begin)
            wanted = np.maximum(self._targets(first) - a_size, 1)
            end = np.minimum(end, np.searchsorted(self._units, self._units[begin] + wanted))
            b_start = np.where(random, self._units[begin], b_start)
            b_end = np.where(random, self._units[end], b_end)
            label[random] = 1
        return (a_start, a_size), (b_start, b_end - b_start), label.astype(np.int32)

    def _truncated(self, keys, a, b):
        """The segments cut to the row: each token too many leaves the longer segment, from its front or back
        by a coin."""
        (a_start, a_size), (b_start, b_size) = a, b
        # What BERT's loop "drop one from A if it is longer, else from B" ends with
        b_kept = np.minimum(b_size, np.maximum(self._room - a_size, self._room // 2))
        a_kept = np.minimum(a_size, self._room - b_kept)
        a_start = a_start + self._heads(keys, TRIM_A, a_size - a_kept)
        b_start = b_start + self._heads(keys, TRIM_B, b_size - b_kept)
        return (a_start, a_kept), (b_start, b_kept)

    def _heads(self, keys, stream, tosses):
        """How many of some coin tosses (int64 [n], below length) fall heads: int64 [n]."""
        words = -(-self.length // 32)
        counted = np.clip(tosses[:, None] - 32 * np.arange(words), 0, 32).astype(np.uint64)
        kept = (np.uint64(1) << counted) - np.uint64(1)
        heads = np.bitwise_count(noise.bits(keys[:, None], noise.counters(stream, words)) & kept)
        return heads.sum(axis=1, dtype=np.int64)

    def _laid_out(self, keys, a, b):
        """The row arrays for segments A and B, masked."""
        (a_start, a_size), (b_start, b_size) = a, b
        row, column = np.arange(len(keys)), np.arange(self.length, dtype=np.int32)
        middle = a_size + 1  # A's [SEP]
        end = middle + 1 + b_size + (b_size > 0)
        in_a = column <= a_size[:, None]
        real = column < end[:, None]
        maskable = real.copy()
        maskable[:, 0] = maskable[row, middle] = maskable[row, end - 1] = False

        def read(field):  # both stretches aligned with their places in the row: no index per token
            in_place = self.corpus.read(self.split, field, a_start - 1, self.length)
            beside = self.corpus.read(self.split, field, b_start - middle - 1, self.length)
            return np.where(in_a, in_place, beside)

        tokens = read("tokens").astype(np.int32)
        special = self._special
        np.putmask(tokens, ~real, special.pad)
        tokens[:, 0] = special.cls
        tokens[row, middle] = tokens[row, end - 1] = special.sep
        word_starts = read("word_starts") | ~maskable if self.masks.whole_word else None
        masked = masking.mask(self.masks, keys, tokens, maskable, word_starts, special)
        types = (column > middle[:, None]) & real
        return {"tokens": tokens, "types": types.astype(np.int32), "segments": real.astype(np.int32)} | masked
