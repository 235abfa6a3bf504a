"""Full sentences packed across documents, [CLS] sentences [SEP] the next document's sentences [SEP] ...,
planned by index.

RoBERTa's FULL-SENTENCES (Liu et al. 2019, section 4.2): a row takes sentences in corpus order until no more
whole one fits; a [SEP] closes each document in it, and the row. Rows come in a new global order every epoch.
A sentence longer than the row is cut.
"""

from collections.abc import Iterator

import numpy as np

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples import chunks, masking
from data_pipelines.examples.evaluation import spread
from data_pipelines.examples.masking import Masking
from data_pipelines.order import schedule


def spec(length: int, masks: Masking) -> dict[str, tuple]:
    """Shapes (without the batch) and dtypes of a batch's arrays: name -> (shape, dtype)."""
    return masking.spec(length, masks)


class PackedSentences:
    """Masked rows of packed sentences from one split of a corpus; in an epoch every token of the split comes
    exactly once.

    A batch holds tokens, types (0), segments and the prediction arrays of `masking.mask`. segments number the
    documents in the row from 1 ([CLS] belongs to the first, a [SEP] to the document that it closes), 0 is
    padding: attention stays within a segment. With cross_document_attention all real tokens are in segment 1.

    corpus: Corpus. split: 'train' or 'heldout'. length: tokens per row. batch_size: rows of the global batch.
    masks: Masking. Raises UserError for a length below 3 or a corpus without the special tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        length: int,
        batch_size: int,
        seed: int,
        masks: Masking = masking.BERT,
        cross_document_attention: bool = False,
    ):
        if length < 3:
            raise UserError(f"length {length} leaves no room beside [CLS] and [SEP]; use at least 3")
        self.corpus, self.split, self.length = corpus, split, length
        self.batch_size, self.seed = batch_size, seed
        self.masks, self.cross_document_attention = masks, cross_document_attention
        self.spec = spec(length, masks)
        self._special = masking.SpecialTokens.of(corpus)
        sentences = corpus.sentences(split)
        self._documents = chunks.document_starts(sentences, corpus.documents(split))
        units = chunks.units(sentences, longest=length - 2, piece=length - 2)
        self._starts = units[chunks.follow(_row_ends(units, self._documents, length))]
        # The documents that begin inside each row: the first of them, and how many
        self._inner = np.searchsorted(self._documents, self._starts[:-1], "right")
        self._inners = np.searchsorted(self._documents, self._starts[1:]) - self._inner

    @property
    def number(self) -> int:
        """Examples per epoch."""
        return len(self._starts) - 1

    def batch(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows (int64 [n]) of a step's global batch: name -> array [n, ...]."""
        return self.build(*schedule(self, step, rows))

    def fixed(self, limit: int) -> Iterator[np.ndarray]:
        """The examples of each batch of a fixed set, at most `limit` in all, spread over the split: int64 [n]."""
        return spread(self.number, limit, self.batch_size)

    def build(self, epoch: int | np.ndarray, example: np.ndarray) -> dict[str, np.ndarray]:
        """The examples (int64 [n], below `number`) as they look in an epoch (integer or int64 [n]): name ->
        array."""
        keys = noise.key(self.seed, epoch, example)
        start = self._starts[example]
        size = self._starts[example + 1] - start
        row, separator = self._separators(example, start)
        end = size + 2 + self._inners[example]
        column = np.arange(self.length, dtype=np.int32)
        real = column < end[:, None]
        maskable = real.copy()
        maskable[:, 0] = maskable[row, separator] = maskable[np.arange(len(end)), end - 1] = False
        stretch = column < size[:, None]

        special = self._special
        tokens = np.where(real, np.int32(special.sep), np.int32(special.pad))
        tokens[:, 0] = special.cls
        tokens[maskable] = self.corpus.read(self.split, "tokens", start, self.length)[stretch]
        word_starts = None
        if self.masks.whole_word:
            word_starts = ~maskable
            word_starts[maskable] = self.corpus.read(self.split, "word_starts", start, self.length)[stretch]
        masked = masking.mask(self.masks, special, keys, tokens, maskable, size, word_starts)
        segments = real.astype(np.int32)
        if not self.cross_document_attention:
            begins = np.zeros(tokens.shape, bool)
            begins[:, 0] = begins[row, separator + 1] = True
            segments *= np.cumsum(begins, axis=1, dtype=np.int32)
        return {"tokens": tokens, "types": np.zeros_like(tokens), "segments": segments} | masked

    def _separators(self, example, start):
        """Where documents end inside the rows: row number and column of each such [SEP], int64 [separators]."""
        count = self._inners[example]
        row = np.repeat(np.arange(len(count)), count)
        rank = np.arange(len(row)) - (np.cumsum(count) - count)[row]  # 0, 1, .. within each row
        boundary = self._documents[self._inner[example][row] + rank]
        return row, 1 + boundary - start[row] + rank


def _row_ends(units, documents, length):
    """The unit after a row beginning at each unit: int64 [units]. documents: where they begin, in tokens."""
    begin = units[:-1]
    document = np.searchsorted(documents, begin, "right")
    # A row's cost is its tokens and one [SEP] per document: a difference of sums that never fall along the corpus
    cost = units[1:] + document
    return np.searchsorted(cost, begin + document + length - 2, "right")
