"""Sums over a corpus: what is counted in each part, or stretch of text, is added up in any order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from functools import reduce
from typing import TypeVar

from data_pipelines.prepare.pool import pool

AHEAD = 2  # parts for each process that are counted at a time
Part, Value = TypeVar("Part"), TypeVar("Value")


def over_parts(
    count: Callable[[Part], Value],
    merge: Callable[[Value, Value], Value],
    start: Callable[[], Value],
    parts: Iterable[Part],
    processes: int = 1,
    pipeline: Callable | None = None,
) -> Value:
    """The values of count(part) for all parts, merged into start().

    count travels to other processes, or to those of Beam's `pipeline`, which is called with what comes before it here.
    merge may change its first argument; neither order nor grouping may matter to it.
    """
    if pipeline:
        return pipeline(count, merge, start, parts)
    with pool(processes) as workers:
        return reduce(merge, in_turn(workers, count, parts, AHEAD * processes), start())


def in_turn(workers: Executor, function: Callable[[Part], Value], parts: Iterable[Part], ahead: int) -> Iterator[Value]:
    """function(part) of each in their order, of which at most `ahead` are waited for at a time."""
    waiting = deque()
    for part in parts:
        waiting.append(workers.submit(function, part))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
