"""What libraries below Python print where several processes work together, made short.

C++ writes to the streams 1 and 2 themselves. They lead to a small process, which outlives an abort: it leaves Gloo's
lines out, and in place of a stack trace it says in one line that another process is gone. Python's own output goes its
old way.
"""

import contextlib
import os
import subprocess
import sys

CHATTER = "[Gloo]"
# What JAX's coordination logs, over many lines, just before it aborts or when it waits at exit for who is gone.
ABORTING = (
    "Polled an error from coordination service", "Use error polling to propagate", "detected fatal errors",
    "Shutdown barrier in coordination service has failed",
)  # fmt: skip
LOST = (
    "error: another process of this run died, never came or cannot be reached, and this one ends with it; "
    "start the same command on every host again: the run goes on from its last checkpoint, if it has one"
)


def sort_out() -> None:
    """Send what C++ prints from now on through the small process, and Python's streams around it."""
    if any(stream.fileno() != number for stream, number in ((sys.stdout, 1), (sys.stderr, 2))):
        return  # somebody else has replaced them
    sys.stdout, sys.stderr = (_same_place(stream) for stream in (sys.stdout, sys.stderr))
    command = [sys.executable, "-S", "-E", __file__]
    # A session of its own: a Ctrl-C is not for it.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
    for number in (1, 2):
        os.dup2(process.stdin.fileno(), number)
    process.stdin.close()


def _same_place(stream):
    stream.flush()
    copy = os.dup(stream.fileno())
    return os.fdopen(copy, "w", 1, encoding=stream.encoding, errors=stream.errors)


def tell_of_loss() -> None:
    """Say it where C++ may be about to: what comes first is the one line."""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"{LOST}\n".encode())


def relay() -> None:
    """Copy lines from standard input to standard output, but for chatter; after the loss of a process one line."""
    lost = False
    for line in sys.stdin.buffer:
        text = line.decode(errors="replace")
        if not lost and any(mark in text for mark in (*ABORTING, LOST)):
            lost = True
            print(LOST, flush=True)
        if not lost and not text.startswith(CHATTER):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    relay()
