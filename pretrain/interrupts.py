"""What SIGINT and SIGTERM do to a command that has nothing to save; imports nothing that takes time."""

import os
import signal
import sys


def end_at_once() -> None:
    """Until `pretrain.training.signals` hears them, they end this process with its status and one line.

    A KeyboardInterrupt in a callback, as JAX has one, would be printed and forgotten; what is cut off anywhere leaves
    nothing half-written.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, frame) -> None:
    print(f"{signal.Signals(number).name}: ended before there was anything to save", file=sys.stderr, flush=True)
    os._exit(75)
