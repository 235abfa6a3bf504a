"""Prepare batches ahead of the training loop, in threads or processes.

The data position is the step, so a loader has no state: one for steps 100 .. 199 yields what one for steps 0 .. 199
yields from step 100 on, with any number of threads, processes or hosts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import grain
import numpy as np

from data_pipelines.processes import Workers


class Loader(AbstractContextManager):
    """Iterates over (step, batch) for steps first .. last - 1, in order, once. Leaving this context stops its workers.

    examples: has `batch_size`, `corpora`, `batch(step, rows)`, where rows from batch_size on are those of later steps,
    and `together`, the number of rows that are best built at once.
    rows: int64 [n], this host's rows of the global batch.
    threads: number of threads that prepare batches ahead; 0: build each batch when it is needed.
    processes: number of processes that do so instead, each with its own memory maps of the corpus.

    An error in a thread or process is raised here unchanged; so is damage that is found in a corpus.
    """

    def __init__(self, examples, first: int, last: int, rows: np.ndarray, *, threads: int = 2, processes: int = 0):
        self._corpora = examples.corpora
        self._first, self._last, self._rows = first, last, len(rows)
        self._group = max(1, examples.together // len(rows))  # steps built at a time
        build = partial(_steps, examples, rows, first, last, self._group)
        count = -(-(last - first) // self._group)
        if processes:
            self._built = Workers(build, count, processes)
        else:
            groups = grain.MapDataset.range(count).map(build)
            self._built = iter(groups.to_iter_dataset(grain.ReadOptions(threads, 2 * threads)))

    def __exit__(self, *_):
        self._built.close()
        self._built = None  # Grain complains if its iterator outlives the interpreter

    def __iter__(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        for first, (arrays, noted) in zip(range(self._first, self._last, self._group), self._built, strict=True):
            for corpus, files in zip(self._corpora, noted, strict=True):
                corpus.checks.add(*files)
                corpus.checks.raise_fault()
            if isinstance(arrays, Exception):
                raise arrays
            for step in range(first, min(first + self._group, self._last)):
                begin = (step - first) * self._rows
                yield step, {name: array[begin : begin + self._rows] for name, array in arrays.items()}


def _steps(examples, rows, first, last, group, index):
    """Build one group of steps. Returns their batches, one after the other: name -> array [steps * n, ...], or the
    exception, since Grain adds lines to an error's text; and for each corpus the files that this process has read."""
    step = first + index * group
    later = examples.batch_size * np.arange(min(group, last - step))[:, None]
    try:
        built = examples.batch(step, (later + rows).ravel())
    except Exception as error:
        built = error
    return built, [corpus.checks.take() for corpus in examples.corpora]
