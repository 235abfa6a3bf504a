"""Functions called in processes of their own, which end with this one: a pool of them, or what builds things ahead.

What `Workers` build comes through a pipe per process: nothing has a name in shared memory that someone would have to
remove, and a reader that is gone, killed or not, breaks the pipe and thereby ends its worker."""

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

AHEAD = 2  # parts for each process that are counted at a time
Part, Value = TypeVar("Part"), TypeVar("Value")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def pool(processes: int) -> Iterator[Executor]:
    """An executor; with one process the calls are made here, when they are submitted.

    UserError where a process was killed. What was submitted and has not begun when the context ends is left undone;
    where it ends with an error or is interrupted, what has begun too.
    """
    if processes <= 1:
        yield _Here()
        return
    spawn = multiprocessing.get_context("spawn")  # threads of the tokenizers do not survive a fork
    executor = ProcessPoolExecutor(processes, spawn, _start_worker)
    try:
        yield executor
    except BrokenProcessPool as error:
        raise UserError(
            f"--processes {processes}: a worker process was killed, as the system does when memory runs out; "
            f"use fewer, {AGAIN}"
        ) from error
    except BaseException:
        for process in list(executor._processes.values()):  # nobody waits for the minutes that they may still need
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
    """What is counted in parts of a corpus, or stretches of text, merged in any order and grouping.

    count, merge: travel to other processes, or to those of a `runner`, which is called as this is.
    """
    if runner:
        return runner(count, merge, parts)
    with pool(processes) as workers:
        return merge(in_turn(workers, count, parts, AHEAD * processes))


def in_turn(workers: Executor, function: Callable[[Part], Value], parts: Iterable[Part], ahead: int) -> Iterator[Value]:
    """function(part) of each in their order, of which at most `ahead` are waited for at a time."""
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
    """Iterates over build(0), build(1) .. build(count - 1), in order, once.

    Of n processes the i-th builds every n-th from i on, and is at most one ahead of what it has been asked for.
    build: picklable, returns something picklable.
    """

    def __init__(self, build: Callable, count: int, processes: int):
        self._count = count
        self._workers = []
        resource_tracker.ensure_running()  # what starts it unblocks the signals
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
            except (EOFError, OSError):  # between two messages; in the middle of one
                process.join()
                raise UserError(
                    f"--workers {len(self._workers)}: a process that prepares batches ended with status "
                    f"{process.exitcode}, perhaps for want of memory; use fewer and run again"
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
