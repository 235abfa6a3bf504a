"""Shorten what C++ libraries print when several processes work together.

C++ writes to file descriptors 1 and 2 directly. They are redirected to a small process, which survives an abort: it
drops Gloo's lines, and replaces a stack trace by one line that another process is gone. Python's own output is not
redirected.
"""

import contextlib
import os
import subprocess
import sys

CHATTER = "[Gloo]"
# Parts of what JAX's coordination service logs, over many lines, before it aborts or waits at exit for a lost process.
ABORTING = (
    "Polled an error from coordination service", "Use error polling to propagate", "detected fatal errors",
    "Shutdown barrier in coordination service has failed",
)  # fmt: skip
LOST = (
    "error: another process of this run died, never started or cannot be reached, and this one ends with it; "
    "start the same command on every host again: the run goes on from its last checkpoint, if it has one"
)


def sort_out() -> None:
    """Send all later output of C++ through the small process, and Python's streams around it."""
    if any(stream.fileno() != number for stream, number in ((sys.stdout, 1), (sys.stderr, 2))):
        return  # other code has replaced the streams
    sys.stdout, sys.stderr = (_same_place(stream) for stream in (sys.stdout, sys.stderr))
    command = [sys.executable, "-S", "-E", __file__]
    # In its own session, so that Ctrl-C does not reach it.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
    for number in (1, 2):
        os.dup2(process.stdin.fileno(), number)
    process.stdin.close()


def _same_place(stream):
    stream.flush()
    copy = os.dup(stream.fileno())
    return os.fdopen(copy, "w", 1, encoding=stream.encoding, errors=stream.errors)


def tell_of_loss() -> None:
    """Print the line about a lost process before C++ does; `relay` prints only the first one."""
    with contextlib.suppress(OSError):  # a closed pipe
        os.write(2, f"{LOST}\n".encode())


def relay() -> None:
    """Copy lines from standard input to standard output without chatter; after the loss of a process, only one line."""
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
