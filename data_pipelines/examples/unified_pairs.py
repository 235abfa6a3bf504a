"""Rows of UniLM's four tasks (Dong et al. 2019, arXiv:1905.03197, sections 2.3 and 2.4), drawn for each row.

Masked tokens are predicted in all of them; which tokens a token sees, and how often a row is drawn:

- bidirectional, 1/3: all tokens of the row, [CLS] A [SEP] B [SEP];
- sequence to sequence, 1/3: a token of the source [CLS] A [SEP] all of the source, a token of the target B [SEP] the
  source, itself and the tokens before it;
- left to right, 1/6: itself and the tokens before it, in [CLS] A [SEP];
- right to left, 1/6: itself and the tokens after it.

B is what follows A in the document: the paper's next-sentence prediction, in bidirectional rows, is left out. As in
BERT, [CLS] and [SEP] are not predicted; a model learns in finetuning where targets end. One sentence alone has no B.
"""

from dataclasses import dataclass

import numpy as np

from data_pipelines.examples.layout import Feature
from data_pipelines.examples.segment_pairs import COIN, SegmentPairs

TASKS = BIDIRECTIONAL, SEQUENCE, LEFT_TO_RIGHT, RIGHT_TO_LEFT = range(4)
SHARES = np.array([2, 2, 1, 1]) / 6
FIRST_TYPES = np.array([0, 4, 2, 3], np.int32)  # of A in each task; B has the next one


@dataclass(frozen=True)
class UnifiedPairs(SegmentPairs):
    """Rows of the four tasks, as `SegmentPairs` without a label makes them. A batch also has ranks: a token sees those
    tokens of its row whose rank is not above its own."""

    label: None = None

    @property
    def spec(self) -> dict[str, Feature]:
        return super().spec | {"ranks": Feature((self.length,))}

    def _segments(self, chosen, draws):
        start, size, label = super()._segments(chosen, draws)
        rows = np.flatnonzero(drawn(draws[:, COIN]) >= LEFT_TO_RIGHT)
        size[rows] = np.stack([size[rows].sum(axis=1), np.zeros_like(rows)], 1)
        return start, size, label

    def _added(self, made, draws, label):
        types, ranks = of_tasks(drawn(draws[:, COIN]), made["types"], made["segments"])
        return {"types": types, "ranks": ranks}


def drawn(bits: np.ndarray) -> np.ndarray:
    """Return the tasks that random bits, uint32 [n], draw: int64 [n]."""
    return np.searchsorted(np.cumsum(SHARES[:-1]) * 2**32, bits, "right")


def of_tasks(tasks: np.ndarray, second: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return token types and ranks of rows, int32 [n, length]. second, real: int32, 1 in B [SEP], and at tokens."""
    place, of_row = np.arange(real.shape[1], dtype=np.int32), tasks[:, None]
    turn = np.select([of_row == SEQUENCE, of_row == LEFT_TO_RIGHT, of_row == RIGHT_TO_LEFT], [second, 1, -1], 0)
    return (FIRST_TYPES[of_row] + second) * real, (turn * place).astype(np.int32)
