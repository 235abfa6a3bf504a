"""Contiguous streams of text, for models that remember: row b of a step continues row b of the step before.

Transformer-XL's batches (Dai et al. 2019, section 3.2), but with the documents in a new order every epoch.
"""

from collections.abc import Iterator

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import DocumentStream, by_epoch
from data_pipelines.examples.evaluation import consecutive

NUMBERS = 2**31 - 1  # segments that int32 has


def spec(length: int) -> dict[str, tuple]:
    """Shapes (without the batch) and dtypes of a batch's arrays: name -> (shape, dtype)."""
    whole = dict.fromkeys(("tokens", "targets", "segments"), ((length,), np.int32))
    return whole | {"weights": ((length,), np.float32)}


class ContiguousStreams:
    """Rows that continue each other, from one split of a corpus. In an epoch every token comes once, but for fewer
    than batch_size * length at the end of the epoch's order, which are other ones every time.

    The stream of an epoch (`DocumentStream`) is cut into pieces of `length` tokens, its examples; row b of the
    epoch's steps has the b-th of batch_size equal runs of them. A batch holds tokens, targets (the next token of the
    stream, also at the row's end), weights (1) and segments: the documents' running number when memory is to be
    `reset` where they end, so that nothing of an earlier one is seen, else 1.

    corpus: Corpus. split: 'train' or 'heldout'. length: tokens per row. batch_size: rows of the global batch.
    Raises UserError for a length below 1 or a corpus without a token to end documents.
    """

    def __init__(self, corpus: Corpus, split: str, length: int, batch_size: int, seed: int, reset: bool = False):
        if length < 1:
            raise UserError(f"length {length} leaves no room for text; use at least 1")
        self.corpus, self.split, self.length = corpus, split, length
        self.batch_size, self.seed, self.reset = batch_size, seed, reset
        self.spec = spec(length)
        self._stream = DocumentStream(corpus, split, seed)
        self._targets = max(self._stream.total - 1, 0)  # every token but the first
        self.steps = self._targets // (batch_size * length)

    @property
    def number(self) -> int:
        """Examples in the stream of an epoch; the last may be shorter."""
        return -(-self._targets // self.length)

    def check_size(self) -> None:
        """Raises UserError where the split is too small for a step."""
        if not self.steps:
            raise UserError(
                f"split '{self.split}' of corpus {self.corpus.path} has {self._stream.total} tokens, a batch of "
                f"{self.batch_size} rows of {self.length} needs {self.batch_size * self.length + 1}: "
                "lower the batch size or the length, or prepare more text"
            )

    def batch(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows (int64 [n]) of a step's global batch: name -> array [n, ...]. Raises UserError as
        `check_size` does."""
        self.check_size()
        later, row = np.divmod(rows, self.batch_size)
        epoch, place = np.divmod(step + later, self.steps)
        return by_epoch(self.build, epoch, row * self.steps + place)

    def fixed(self, limit: int) -> Iterator[np.ndarray]:
        """The examples of each batch of a fixed set, at most `limit` in all, rows continuing each other: int64 [n]."""
        return consecutive(self.number, limit, self.batch_size)

    def build(self, epoch: int, example: np.ndarray) -> dict[str, np.ndarray]:
        """The examples (int64 [n], below `number`) as they look in an epoch: name -> array [n, ...]. Beyond the
        stream's end weights and segments are 0."""
        start = example * self.length
        size = np.minimum(self.length + 1, self._stream.total - start)
        order = self._stream.order(epoch)
        tokens, place = self._stream.read(order, start, size)
        read = np.arange(self.length + 1) < size[:, None]
        window = np.zeros(read.shape, np.int32)
        window[read] = tokens
        real = read[:, 1:]
        segments = real.astype(np.int32)
        if self.reset:
            numbers = np.zeros(read.shape, np.int32)
            # Running on over epochs: with the same number again, the memory would be of another text
            numbers[read] = 1 + (epoch * len(order.documents) + place) % NUMBERS
            segments *= numbers[:, :-1]
        arrays = {"tokens": window[:, :-1] * real, "targets": window[:, 1:], "segments": segments}
        return arrays | {"weights": real.astype(np.float32)}
