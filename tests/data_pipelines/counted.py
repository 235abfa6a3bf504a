"""A layout whose rows say which example of which part they are, over a corpus of nothing but sizes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.batches import make_examples
from data_pipelines.examples.layout import Feature, RowLayout
from data_pipelines.order import Order

SEED = 1
EPOCHS = 32  # that a key is looked for in


class Plan(NamedTuple):
    index: int
    number: int


class Part(NamedTuple):
    index: int
    sizes: dict
    corpus: object = None


class Sizes:
    """A corpus of parts of these sizes."""

    path = "corpora/none"

    def __init__(self, sizes, split="train"):
        split_sizes = ({"documents": size, "sentences": size, "tokens": size} for size in sizes)
        self.parts = tuple(Part(index, {split: of}) for index, of in enumerate(split_sizes))
        self.wanted, self.released = [], []

    def want(self, split, parts):
        self.wanted.append(list(parts))

    def release(self, split, parts):
        self.released += parts


@dataclass(frozen=True)
class Counted(RowLayout):
    """Rows of their part, their number in it, and the epoch that their key is of."""

    @property
    def spec(self):
        return dict.fromkeys(("part", "example"), Feature((), np.int64)) | {"key": Feature((), np.uint64)}

    def plan(self, part, split, seed):
        return Plan(part.index, part.sizes[split]["tokens"])

    def build(self, chosen, keys):
        part, example = chosen.gather(lambda plan, _, example: (np.full(len(example), plan.index), example))
        return {"part": part, "example": example, "key": keys}


def counted(sizes, batch_size, lanes=1, window=4, seed=SEED, split="train"):
    return Numbered(make_examples(Counted(1), Sizes(sizes, split), split, batch_size, seed, Order(lanes, window)))


class Numbered:
    """Examples, picklable, with the number of each in its split and the epoch in place of the key."""

    def __init__(self, examples):
        self.examples, self.batch_size = examples, examples.batch_size
        self.firsts = np.cumsum((0, *examples.sizes))

    def batch(self, step, rows):
        return self.named(self.examples.batch(step, rows))

    def named(self, batch):
        example = self.firsts[batch["part"]] + batch["example"]
        keys = np.stack([noise.key(self.examples.seed, epoch, example) for epoch in range(EPOCHS)])
        return {"part": batch["part"], "example": example, "epoch": np.argmax(keys == batch["key"], axis=0)}
