"""Tables of metrics: printing them and writing them to a .tsv file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from data_pipelines.durable import writing
from pretrain.commands.common import wide_console
from pretrain.storage.run_directory import write_whole

Lines = Sequence[Mapping[str, str | int | float]]  # column name -> value


def show(lines: Lines) -> None:
    """Print one or more table rows; floats get four decimals."""
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*(Text(f"{value:.4f}" if isinstance(value, float) else str(value)) for value in line.values()))
    wide_console().print(table)


def store(lines: Lines, out: Path) -> None:
    """Write table rows with a header line. UserError naming --out if the file cannot be written."""
    rows = ["\t".join(map(str, line)) for line in (lines[0], *(line.values() for line in lines))]
    with writing(out):
        write_whole(out, "".join(f"{row}\n" for row in rows))
