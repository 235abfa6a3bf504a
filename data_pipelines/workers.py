"""Build things ahead in processes of their own, which never outlive the process that reads them.

What is built comes through a pipe per process: nothing has a name in shared memory that someone would have to remove,
and a reader that is gone, killed or not, breaks the pipe and thereby ends its worker.
"""

import atexit
import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

from data_pipelines.errors import UserError


class Workers:
    """Iterates over build(0), build(1) .. build(count - 1), in order, once.

    Of n processes the i-th builds every n-th from i on, and is at most one ahead of what it has been asked for.
    build: picklable, returns something picklable.
    """

    def __init__(self, build: Callable, count: int, processes: int):
        self._count = count
        self._workers = []
        resource_tracker.ensure_running()  # what starts it unblocks the signals
        with _signals_blocked():
            for first in range(min(processes, count)):
                self._workers.append(_start(build, range(first, count, processes)))
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
    with contextlib.suppress(BrokenPipeError):  # nobody reads any more
        for index in indices:
            pipe.send(build(index))


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes started here never see a terminal's or a scheduler's signals, which go to all processes of a run:
    the reader needs its batches until the step at which it stops. Here they arrive when the context ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
