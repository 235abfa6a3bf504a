"""Tasks of which every step has one, with batches of its own."""

from collections.abc import Mapping

import numpy as np

from data_pipelines.batches import Examples
from data_pipelines.corpus import Corpus
from data_pipelines.mixture import Mixture, counts, weights_of


class Tasks:
    """Batches of one task, or of several that take turns. Which one a step has, and how many it had before, is known
    from the step alone: the steps of a task are never off its rate by more than a few (see `mixture.counts`).

    batches: name -> those of a task.   rates: name -> how often it comes.
    together: see `Loader`; batches of several tasks have other arrays from step to step.
    """

    def __init__(self, batches: Mapping[str, Examples | Mixture], rates: Mapping[str, float]):
        total = sum(rates.values())
        self.batches, self._weights = dict(batches), weights_of([rates[name] / total for name in batches])
        first = next(iter(batches.values()))
        self.batch_size, self.together = first.batch_size, first.together if len(batches) == 1 else 1

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """What is read."""
        return tuple(corpus for of in self.batches.values() for corpus in of.corpora)

    def at(self, step: int) -> tuple[str, int]:
        """(the task of a step, how many steps it had before)."""
        before, after = counts(self._weights, step), counts(self._weights, step + 1)
        index = next(index for index, (old, new) in enumerate(zip(before, after, strict=True)) if new > old)
        return [*self.batches][index], before[index]

    def before(self, step: int) -> dict[str, int]:
        """How many steps of each task come before a step."""
        return dict(zip(self.batches, counts(self._weights, step), strict=True))

    def batch(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows (int64 [n], of one task from batch_size on those of later steps) of a step's global batch:
        name -> array [n, ...]."""
        name, number = self.at(step)
        return self.batches[name].batch(number, rows)
