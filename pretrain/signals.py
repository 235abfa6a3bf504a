"""The one module that owns signals: SIGTERM and SIGINT ask the run to stop after its step.

Of several processes, JAX's preemption service hears SIGTERM and names a step at which all of them stop; a Python
handler beside it would keep it from hearing.
"""

import contextlib
import signal
from collections.abc import Iterator

import jax

from tpu.cluster import preempted

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a checkpoint is written, the same command goes on from it

_HANDLED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Set by the first signal; a second one ends the process at once. signal: its name."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def reached(self, step: int) -> bool:
        """Whether to stop before this step; every process of a run asks at every step."""
        if jax.process_count() > 1 and self.signal is None and preempted(step):
            self.signal = "SIGTERM"
        return bool(self)

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """While the context lasts, signals set the request that it yields; then the old handlers are back."""
    request = StopRequest()
    if jax.process_count() > 1:
        yield request
        return

    def handle(number: int, frame) -> None:
        request.signal = signal.Signals(number).name
        for handled in _HANDLED:
            signal.signal(handled, signal.SIG_DFL)

    old = {handled: signal.signal(handled, handle) for handled in _HANDLED}
    try:
        yield request
    finally:
        for handled, handler in old.items():
            signal.signal(handled, handler)
