"""The one module that owns signals: SIGTERM and SIGINT ask the run to stop after its step."""

import contextlib
import signal
from collections.abc import Iterator

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a checkpoint is written, the same command goes on from it

_HANDLED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Set by the first signal; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """While the context lasts, signals set the request that it yields; then the old handlers are back."""
    request = StopRequest()

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
