"""Rows that name which of their tokens are global: a sparse pattern lets those see all and be seen by all."""

from dataclasses import dataclass

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Chosen, Feature, RowLayout


@dataclass(frozen=True)
class GlobalTokens(RowLayout):
    """The rows of another layout and, for each, int32 [number] `globals`: the position of its first token, then those
    of its separators in order, -1 where there are no more.

    Raises UserError for more than the row has tokens.
    """

    rows: RowLayout
    number: int

    def __post_init__(self):
        if not 1 <= self.number <= self.length:
            raise UserError(f"globals={self.number}: must be from 0, for none, to the row's length={self.length}")

    @property
    def copies(self):
        return self.rows.copies

    @property
    def spec(self) -> dict[str, Feature]:
        return self.rows.spec | {"globals": Feature((self.number,))}

    def check(self, corpus):
        self.rows.check(corpus)

    def plan(self, part, split: str, seed: int):
        return self.rows.plan(part, split, seed)

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        batch = self.rows.build(chosen, keys)
        return batch | {"globals": global_positions(batch["tokens"], chosen.plans[0].special.sep, self.number)}


def global_positions(tokens: np.ndarray, sep: int, number: int) -> np.ndarray:
    """`globals` i32[rows, number] of rows of tokens."""
    is_global = tokens == sep
    is_global[:, 0] = True
    row, position = np.nonzero(is_global)
    rank = (np.cumsum(is_global, axis=1) - 1)[row, position]  # 0, 1, .. within each row
    within = rank < number
    named = np.full((len(is_global), number), -1, np.int32)
    named[row[within], rank[within]] = position[within]
    return named
