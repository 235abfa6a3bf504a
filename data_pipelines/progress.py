"""What a terminal shows while something long is done."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def busy(what: str, console: Console | None = None) -> Iterator[None]:
    """A line that says what is done and for how long, and goes away; nothing where there is no terminal."""
    console = console or Console()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(what, total=None)
        yield
