"""What a terminal shows while something long is done."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

IMPORTING = "importing JAX and the models"


def doing(what: str) -> None:
    """Say on stderr what begins and takes seconds, if that is a terminal: elsewhere it is for errors and warnings."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def busy(what: str, console: Console | None = None) -> Iterator[None]:
    """A line that says what is done and for how long, and goes away; nothing where there is no terminal."""
    console = console or Console()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(what, total=None)
        yield
