"""Progress lines on a terminal during long work."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

IMPORTING = "importing JAX and the models"


def doing(what: str) -> None:
    """Print on stderr what begins now and takes seconds, if stderr is a terminal; elsewhere it is for errors."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def busy(what: str, console: Console | None = None) -> Iterator[None]:
    """Show a line with the current work and the elapsed time, and clear it at the end; nothing without a terminal."""
    console = console or Console()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(what, total=None)
        yield
