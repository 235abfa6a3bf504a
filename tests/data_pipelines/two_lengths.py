"""A layout whose arrays have two lengths, and a label that may be none."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines.examples.layout import Feature, RowLayout


class Plan(NamedTuple):
    part: Any
    split: str
    number: int


@dataclass(frozen=True)
class TwoWindows(RowLayout):
    """Windows of `length` tokens, and the `target` tokens after each: `targets`, of which `even` says whether the first
    one is (1), or not (0)."""

    target: int

    @property
    def spec(self):
        return {
            "tokens": Feature((self.length,)),
            "targets": Feature((self.target,)),
            "even": Feature((), np.int8, fill=-1),
        }

    @property
    def tokens(self):
        return self.length + self.target

    def plan(self, part, split, seed):
        return Plan(part, split, part.sizes[split]["tokens"] // self.tokens)

    def build(self, chosen, keys):
        (starts,) = chosen.gather(lambda plan, rows, example: (example * self.tokens,))
        window = chosen.read("tokens", starts, self.tokens).astype(np.int32)
        tokens, targets = np.split(window, [self.length], axis=1)
        return {"tokens": tokens, "targets": targets, "even": (targets[:, 0] % 2 == 0).astype(np.int8)}
