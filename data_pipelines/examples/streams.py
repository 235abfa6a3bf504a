"""Contiguous streams of text, for models that remember: row b of a step continues row b of the step before.

Transformer-XL's batches (Dai et al. 2019, section 3.2), but with the documents in a new order every epoch.
"""

from dataclasses import dataclass

import numpy as np

from data_pipelines.examples.document_stream import DocumentStream, NextTokens
from data_pipelines.examples.layout import StreamLayout

NUMBERS = 2**31 - 1  # segments that int32 has


@dataclass(frozen=True)
class ContiguousStreams(NextTokens, StreamLayout):
    """Rows that continue each other. Of a stream every token comes once, but for fewer than rows * length at its end.

    A stream is cut into pieces of `length` tokens, its examples; row b has the b-th of equally many runs of them, one
    for each row. A batch holds tokens, targets (the next token of the stream, also at the row's end), weights (1) and
    segments: the documents' running number when memory is to be `reset` where they end, so that nothing of an earlier
    one is seen, else 1.
    """

    reset: bool = False

    def number(self, total: int) -> int:
        """The last may be shorter."""
        return -(-max(total - 1, 0) // self.length)  # the first token is no target

    def steps(self, total: int, rows: int) -> int:
        return max(total - 1, 0) // (rows * self.length)

    def example(self, total: int, rows: int, row: np.ndarray, step: np.ndarray) -> np.ndarray:
        return row * self.steps(total, rows) + step

    def plan(self, pieces, split: str, key: int, epoch: int, first: int = 0) -> DocumentStream:
        return DocumentStream(pieces, split, key, epoch, first=first)

    def build(self, plan: DocumentStream, example: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Beyond the stream's end weights and segments are 0."""
        window, place = plan.rows(example, self.length)
        real = place[:, 1:] >= 0
        segments = real.astype(np.int32)
        if self.reset:
            # Running on over streams: with the same number again, the memory would be of another text
            segments *= (1 + (plan.first + place) % NUMBERS).astype(np.int32)[:, :-1]
        arrays = {"tokens": window[:, :-1] * real, "targets": window[:, 1:], "segments": segments}
        return arrays | {"weights": real.astype(np.float32)}
