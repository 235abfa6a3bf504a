"""The one module that owns how a run is stopped: SIGTERM and SIGINT, here or in another of its processes.

A thread hears them, whatever the main thread does. Before the first step there is nothing to save and the process ends
at once; from then on all processes stop before the same step: each names the step that it is at, through the key-value
store of JAX's cluster, and goes no further until it has heard of all.
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

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on from the last checkpoint

_HANDLED = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.5  # between two looks at what other processes say
_SAME_SECONDS = 1  # in which a signal that comes again is the same one, as from two programs that pass it on


class StopRequest:
    """Set by the first signal to any process of a run; a second one ends the process at once. signal: its name."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._step: int | None = None  # the one at hand
        self._before: int | None = None
        self._lock = threading.Lock()  # held while the processes settle on a step
        self.heard, self._settled, self.over = threading.Event(), threading.Event(), threading.Event()

    def reached(self, step: int) -> bool:
        """Whether to stop before this step; every process of a run asks at every step."""
        with self._lock:
            self._step = step
        if self.heard.is_set():  # the main thread may have known it first
            self._settled.wait()
        with self._lock:
            return self._before is not None and step >= self._before

    def settle(self, name: str) -> None:
        """Stop all processes before the same step, at once if one of them has not begun its first."""
        with self._lock:
            steps = [self._step]
            if cluster.several():
                cluster.notify("stop", f"{name} {self._step}")
                steps = self._steps_of_all()
            if self.over.is_set():
                return
            if None in steps:
                if cluster.is_first():
                    print(f"{name}: before the first step, so nothing is to be saved; the same command goes on")
                cluster.leave(EXIT_STOPPED)
            self.signal, self._before = name, max(steps) + 1
        self._settled.set()

    def _steps_of_all(self) -> list[int | None]:
        """The step at hand in each process; of those that spoke, where the run is over before all have."""
        while len(said := cluster.notices("stop")) < cluster.size() and not self.over.is_set():
            cluster.end_with_others()
            time.sleep(0.05)
        steps = [text.split()[1] for text in said.values()]
        return [None if step == "None" else int(step) for step in steps]


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """While the context lasts, signals set the request that it yields; then the old handlers are back.

    To be entered in the main thread, before `cluster.join`.
    """
    request = StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Where the interpreter writes the numbers of signals; from before the first is heard, which the watcher must read.
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
    """Until the other end of the pipe is closed."""
    heard_at = None  # by this process; another may have had its signal long before
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
            heard_at = heard_at or time.monotonic()  # what came while they settled is read now
        if numbers is None and cluster.several():
            _unless_alone(_look_around, request)


def _unless_alone(act: Callable[..., None], *arguments) -> None:
    """Where the others cannot be reached any more, JAX ends this process."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        act(*arguments)


def _look_around(request: StopRequest) -> None:
    """Hear what the other processes say."""
    if cluster.notices("ended"):
        # The main thread may be about to say why by itself. The first process goes after twice that time.
        time.sleep(cluster.FAREWELL_SECONDS / 2)
        cluster.end_with_others()
    if request.signal is None and (said := cluster.notices("stop")):
        request.settle(next(iter(said.values())).split()[0])
