"""Prepare batches ahead of the training loop, in threads or processes.

The data position is the step, so nothing here is state: a loader for steps 100 .. 199 yields what one for steps
0 .. 199 yields from step 100 on, whatever the threads, processes or hosts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import grain
import numpy as np

from data_pipelines.processes import Workers


class Loader(AbstractContextManager):
    """Iterates over (step, batch) for steps first .. last - 1, in order, once. A context manager: leaving it stops
    the threads or processes.

    examples: has batch_size, `corpora` and batch(step, rows), where rows from batch_size on are those of later steps,
    and says how many rows of small batches are best built `together`.
    rows: int64 [n], this host's rows of the global batch.
    threads: how many threads prepare batches ahead; 0: a batch is built when asked for.
    processes: how many processes do it instead, each with its own maps of the corpus.

    What fails in a thread or process is raised here, as it was; and what is found to be damaged in a corpus.
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
        self._built = None  # Grain complains where its iterator outlives the interpreter

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
    """(the batches of one group of steps, one after the other: name -> array [steps * n, ...]; or what went wrong, for
    Grain adds lines of its own to an error's text; of each corpus the files that this process has noted)."""
    step = first + index * group
    later = examples.batch_size * np.arange(min(group, last - step))[:, None]
    try:
        built = examples.batch(step, (later + rows).ravel())
    except Exception as error:
        built = error
    return built, [corpus.checks.take() for corpus in examples.corpora]
