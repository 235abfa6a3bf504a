"""What commands that draw share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.backend_bases import FigureCanvasBase

from data_pipelines.errors import UserError
from pretrain.commands.common import writing

pyplot.switch_backend("Agg")


def check_ending(out: Path) -> None:
    """UserError where no picture has a name that ends so."""
    if out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"--out {out}: no picture's name ends like this; use .png, .pdf or .svg")


def save(figure, marks: Mapping[str, Any], columns: int, out: Path) -> Path:
    """Write a picture of a checked ending whole or not at all, and forget it -> the file; UserError naming --out.

    marks: label -> what stands beside it in the legend.
    """
    legend = {"loc": "outside lower center", "ncols": columns, "fontsize": "small", "frameon": False}
    figure.legend(marks.values(), marks.keys(), **legend)
    temporary = out.with_name(f"{out.stem}.partial{out.suffix}")
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(temporary, dpi=110)
            temporary.replace(out)
    finally:
        pyplot.close(figure)
    return out
