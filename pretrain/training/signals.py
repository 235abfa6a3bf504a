"""Stop a run on SIGTERM or SIGINT to any of its processes; only this module handles signals.

A thread receives them, whatever the main thread does. Before the first step there is nothing to save, and the process
ends at once. Later, all processes stop before the same step: each writes its current step to the key-value store of
JAX's cluster, and waits until it has read those of all others.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import jax
from rich.console import Console

from tpu import cluster

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes from the last checkpoint

_HANDLED = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.5  # between two reads of other processes' notices
_SAME_SECONDS = 1  # a signal repeated within it counts once, as when two programs pass it on


class StopRequest:
    """Set by the first signal to any process of a run; a second one ends the process at once. signal: its name."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._step: int | None = None  # the current step
        self._before: int | None = None
        self._lock = threading.Lock()  # held while the processes agree on a step
        self.heard, self._settled, self.over = threading.Event(), threading.Event(), threading.Event()

    def reached(self, step: int) -> bool:
        """Return whether to stop before this step; every process of a run calls this at every step."""
        with self._lock:
            self._step = step
        if self.heard.is_set():  # the signal may reach the main thread first
            self._settled.wait()
        with self._lock:
            return self._before is not None and step >= self._before

    def settle(self, name: str) -> None:
        """Make all processes stop before the same step, or at once if one has not started its first step."""
        with self._lock:
            steps = [self._step]
            if cluster.several():
                cluster.notify("stop", f"{name} {self._step}")
                steps = self._steps_of_all()
            if self.over.is_set():
                return
            if None in steps:
                if cluster.is_first():
                    print(f"{name}: stopped before the first step, so nothing was saved; the same command resumes")
                cluster.leave(EXIT_STOPPED)
            self.signal, self._before = name, max(steps) + 1
        self._settled.set()

    def _steps_of_all(self) -> list[int | None]:
        """Wait for the current step of every process; return those received if the run ends first."""
        while len(notices := cluster.notices("stop")) < cluster.size() and not self.over.is_set():
            cluster.end_with_others()
            time.sleep(0.05)
        steps = [text.split()[1] for text in notices.values()]
        return [None if step == "None" else int(step) for step in steps]


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Let signals set the yielded request. Enter this in the main thread, before `cluster.join`."""
    request = StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The interpreter writes the numbers of signals there; set it before the handlers, so that the watcher misses none.
    old_writer = signal.set_wakeup_fd(writer)
    old = {handled: signal.signal(handled, lambda number, frame: request.heard.set()) for handled in _HANDLED}
    watcher = threading.Thread(target=_watch, args=(request, reader), daemon=True)
    watcher.start()
    try:
        yield request
    finally:
        request.over.set()
        signal.set_wakeup_fd(old_writer)
        for handled, handler in old.items():
            signal.signal(handled, handler)
        os.close(writer)
        watcher.join()
        os.close(reader)


def _watch(request: StopRequest, reader: int) -> None:
    """Handle signals until the other end of the pipe is closed."""
    heard_at = None  # in this process; another may have received it long before
    while True:
        numbers = os.read(reader, 64) if select.select([reader], [], [], _POLL_SECONDS)[0] else None
        if numbers == b"":
            return
        again = heard_at is not None and time.monotonic() > heard_at + _SAME_SECONDS
        for number in set(numbers or ()).intersection(_HANDLED):
            if again:
                Console().show_cursor()  # as in `cluster.leave`
                os._exit(128 + number)
            if request.signal is None:
                _unless_alone(request.settle, signal.Signals(number).name)
            heard_at = heard_at or time.monotonic()  # set after settling: signals sent meanwhile are read now
        if numbers is None and cluster.several():
            _unless_alone(_check_notices, request)


def _unless_alone(act: Callable[..., None], *arguments) -> None:
    """Call `act`; ignore unreachable other processes, for which JAX ends this process."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        act(*arguments)


def _check_notices(request: StopRequest) -> None:
    """Act on the notices of other processes."""
    if cluster.notices("ended"):
        # Leave the main thread time to report why. The first process leaves after twice that time.
        time.sleep(cluster.FAREWELL_SECONDS / 2)
        cluster.end_with_others()
    if request.signal is None and (notices := cluster.notices("stop")):
        request.settle(next(iter(notices.values())).split()[0])
