"""Tables of figures, as commands print them and write them to a .tsv file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from pretrain.commands.common import wide_console, writing
from pretrain.storage.run_directory import write_whole

Lines = Sequence[Mapping[str, str | int | float]]  # name -> what stands in its column


def show(lines: Lines) -> None:
    """Print one or more lines, of numbers that are not whole four digits."""
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*(Text(f"{of:.4f}" if isinstance(of, float) else str(of)) for of in line.values()))
    wide_console().print(table)


def store(lines: Lines, out: Path) -> None:
    """Write them with a line of names. UserError naming --out where that cannot be."""
    rows = ["\t".join(map(str, line)) for line in (lines[0], *(line.values() for line in lines))]
    with writing(out):
        write_whole(out, "".join(f"{row}\n" for row in rows))
