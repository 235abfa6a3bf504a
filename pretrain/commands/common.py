"""What commands share: options are checked before models are imported, which takes seconds; files are written whole."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from tyro.conf import Positional

from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from data_pipelines.progress import IMPORTING, doing
from models.core.ranges import Range
from pretrain.options import check_options

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfModel:
    """Options of what reads a trained model."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    step: int | None = None
    """Which checkpoint; by default the newest."""
    best: str | None = None
    """The checkpoint with the lowest held-out loss: of a task, by its name, or of the run, by the name loss."""


def parse_checked(
    options: type[Options], arguments: Sequence[str], command: str, ranges: Mapping[str, Range]
) -> Options:
    """A command's options. UserError for one that is out of its range, and for a text that is not UTF-8, which no
    tokenizer reads.   ranges: of options by name; one that is None is not looked at."""
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
                raise UserError(f"--{field.name.replace('_', '-')} {text!r}: is not UTF-8; write it so")


def changed(options, prefix: str = "--", but: Collection[str] = ()) -> list[str]:
    """The options that are not their defaults, as they are given, without some fields."""
    fields = (field for field in dataclasses.fields(options) if field.name not in but)
    named = {field.name: getattr(options, field.name) != field.default for field in fields}
    return [prefix + name.replace("_", "-") for name, given in named.items() if given]


def import_models() -> None:
    """Say that it begins, and have JAX write whole what it keeps of compiled programs."""
    doing(IMPORTING)
    from tpu.compiled import keep_programs_whole

    keep_programs_whole()


def wide_console() -> Console:
    """Wide where nobody set a width, so that a pipe or a log gets whole rows."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """UserError naming --out where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {out}: cannot write there ({error.strerror}); choose another place") from None


def check_file(out: Path) -> None:
    """Make the folder of a file that will be written; UserError naming --out where that could not be."""
    with writing(out):
        if out.exists() and not out.is_file():
            raise UserError(f"--out {out}: is no file; give a file, new or to be replaced")
        probe = out.with_name(f"{out.name}.partial")
        out.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def check_apart(out: Path, examples: Path) -> None:
    """UserError where the file that will be written is that of --examples."""
    if out.resolve() == examples.resolve():
        raise UserError(f"--out {out}: is the file of --examples, which it would replace; give another")


def check_picture(out: Path) -> None:
    """UserError where no picture has a name that ends so."""
    from matplotlib.backend_bases import FigureCanvasBase

    if out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"--out {out}: no picture's name ends like this; use .png, .pdf or .svg")


def add_legend(figure, marks: Mapping[str, Any], columns: int) -> None:
    """A legend below a matplotlib figure.   marks: label -> what stands beside it."""
    legend = {"loc": "outside lower center", "ncols": columns, "fontsize": "small", "frameon": False}
    figure.legend(marks.values(), marks.keys(), **legend)


def save_picture(figure, marks: Mapping[str, Any], columns: int, out: Path) -> Path:
    """Write a matplotlib figure with `add_legend` whole or not at all -> the file, of a checked ending; UserError
    naming --out."""
    add_legend(figure, marks, columns)
    temporary = out.with_name(f"{out.stem}.partial{out.suffix}")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=110)
        temporary.replace(out)
    return out
