"""Functions that commands share. Options are checked before models are imported, which takes seconds."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from tyro.conf import Positional

from data_pipelines.command_line import Place, parse
from data_pipelines.durable import writing
from data_pipelines.errors import UserError
from data_pipelines.progress import IMPORTING, doing
from models.core.ranges import Range
from pretrain.options import check_options

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfModel:
    """Options of commands that read a trained model."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    step: int | None = None
    """Step of the checkpoint to read; by default the newest."""
    best: str | None = None
    """Read the checkpoint with the lowest held-out loss: of a task, given its name, or of the run, given 'loss'."""
    ema: bool = False
    """Read the running mean of the weights, of a run with --optimizer.ema."""


def parse_checked(
    options: type[Options], arguments: Sequence[str], command: str, ranges: Mapping[str, Range]
) -> Options:
    """Parse a command's options. UserError for one that is out of its range, or whose text is not UTF-8, which no
    tokenizer reads.   ranges: option -> its range; options that are None are not checked."""
    parsed = parse(options, arguments, f"python -m pretrain {command}")
    check_options(parsed, ranges)
    _check_texts(parsed)
    return parsed


def _check_texts(options) -> None:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            _check_texts(value)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and text != text.encode("utf-8", "ignore").decode():
                raise UserError(f"--{field.name.replace('_', '-')} {text!r}: is not UTF-8; encode it as UTF-8")


def changed(options, prefix: str = "--", but: Collection[str] = ()) -> list[str]:
    """List the options that differ from their defaults, as a user writes them, except the fields in `but`."""
    fields = (field for field in dataclasses.fields(options) if field.name not in but)
    differs = {field.name: getattr(options, field.name) != field.default for field in fields}
    return [prefix + name.replace("_", "-") for name, different in differs.items() if different]


def import_models() -> None:
    """Announce the imports, and make JAX write its compilation cache atomically."""
    doing(IMPORTING)
    from tpu.compiled import keep_programs_whole

    keep_programs_whole()


def wide_console() -> Console:
    """Return a console that does not wrap the rows of tables in a pipe or a log."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def check_file(out: Path) -> None:
    """Create the folder of a file that will be written; UserError naming --out if the file cannot be written."""
    with writing(out):
        if out.exists() and not out.is_file():
            raise UserError(f"--out {out}: is not a file; give a new file, or one to replace")
        probe = out.with_name(f"{out.name}.partial")
        out.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def check_apart(out: Path, examples: Path) -> None:
    """Raise UserError if --out is the file of --examples."""
    if out.resolve() == examples.resolve():
        raise UserError(f"--out {out}: would replace the file of --examples; give another file")


def check_picture(out: Path) -> None:
    """Raise UserError if matplotlib writes no format of this file ending."""
    from matplotlib.backend_bases import FigureCanvasBase

    if out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"--out {out}: is not an image format; use .png, .pdf or .svg")


def add_legend(figure, marks: Mapping[str, Any], columns: int) -> None:
    """Add a legend below a matplotlib figure.   marks: label -> its handle."""
    legend = {"loc": "outside lower center", "ncols": columns, "fontsize": "small", "frameon": False}
    figure.legend(marks.values(), marks.keys(), **legend)


def save_picture(figure, marks: Mapping[str, Any], columns: int, out: Path) -> Path:
    """Write a matplotlib figure with a legend atomically -> its file. UserError naming --out if that fails."""
    add_legend(figure, marks, columns)
    temporary = out.with_name(f"{out.stem}.partial{out.suffix}")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=110)
        temporary.replace(out)
    return out
