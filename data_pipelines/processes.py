"""Run functions in processes that end with this one: in a pool, or in `Workers`, which build things ahead.

`Workers` send results through a pipe per process. So no shared memory has a name that someone would have to remove, and
when the reader is gone, killed or not, the broken pipe ends its worker.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TypeVar

from data_pipelines.errors import AGAIN, UserError

AHEAD = 2  # parts in flight per process
Part, Value = TypeVar("Part"), TypeVar("Value")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def pool(processes: int) -> Iterator[Executor]:
    """Yield an executor; with one process, calls are made here, when they are submitted. UserError if one was killed.
    At the end of the context, calls that have not begun are cancelled; after an error, running ones are killed."""
    if processes <= 1:
        yield _Here()
        return
    spawn = multiprocessing.get_context("spawn")  # threads of the tokenizers do not survive a fork
    executor = ProcessPoolExecutor(processes, spawn, _start_worker)
    try:
        yield executor
    except BrokenProcessPool as error:
        raise UserError(
            f"--processes {processes}: a worker was killed, maybe for memory; use fewer; {AGAIN}"
        ) from error
    except BaseException:
        for process in list(executor._processes.values()):  # they may still need minutes
            process.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def over_parts(
    count: Callable[[Part], Value],
    merge: Callable[[Iterable[Value]], Value],
    parts: Iterable[Part],
    processes: int = 1,
    runner: Callable | None = None,
) -> Value:
    """Count in parts of a corpus, or in stretches of text, and merge the counts in any order and grouping.   count,
    merge: must pickle.   runner: takes count, merge and parts, and counts elsewhere, as Beam does."""
    if runner:
        return runner(count, merge, parts)
    with pool(processes) as workers:
        return merge(in_turn(workers, count, parts, AHEAD * processes))


def in_turn(workers: Executor, function: Callable[[Part], Value], parts: Iterable[Part], ahead: int) -> Iterator[Value]:
    """Yield function(part) of each part, in order, with at most `ahead` calls in flight."""
    waiting = deque()
    for part in parts:
        waiting.append(workers.submit(function, part))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class _Here(Executor):
    def submit(self, function: Callable, /, *arguments) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # a killed run leaves no workers behind
    os._exit(1)


class Workers:
    """Iterates over build(0), build(1) .. build(count - 1), in order, once. Process i of n builds items i, i + n, ...,
    at most one ahead of the reader. build, and its results: picklable."""

    def __init__(self, build: Callable, count: int, processes: int):
        self._count = count
        self._workers = []
        resource_tracker.ensure_running()  # before the signals are blocked: starting it unblocks them
        # Processes started here never see a terminal's or a scheduler's signals, which go to all processes of a run:
        # the reader needs its batches until the step at which it stops. Here they arrive when all have started
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            for first in range(min(processes, count)):
                self._workers.append(_start(build, range(first, count, processes)))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        atexit.register(self.close)  # before multiprocessing waits for its children

    def __iter__(self) -> Iterator:
        for index in range(self._count):
            process, pipe = self._workers[index % len(self._workers)]
            try:
                yield pipe.recv()
            except (EOFError, OSError):  # the pipe ended between two messages; inside one
                process.join()
                raise UserError(
                    f"--workers {len(self._workers)}: a process that prepares batches ended with status "
                    f"{process.exitcode}, perhaps because memory ran out; use fewer and run again"
                ) from None

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join()


def _start(build: Callable, indices: range) -> tuple[multiprocessing.Process, Connection]:
    spawn = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork
    reader, writer = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_work, args=(build, indices, writer), daemon=True)
    process.start()
    writer.close()
    return process, reader


def _work(build: Callable, indices: range, pipe: Connection) -> None:
    with suppress(BrokenPipeError):  # nobody reads any more
        for index in indices:
            pipe.send(build(index))
