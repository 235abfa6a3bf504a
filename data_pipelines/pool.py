"""Functions called in processes of their own, which end with this one."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from data_pipelines.errors import AGAIN, UserError

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
