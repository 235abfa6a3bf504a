"""`python -m pretrain plot`: draw learning curves."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from data_pipelines.command_line import Place
from data_pipelines.errors import UserError
from pretrain.commands.common import check_picture, import_models, parse_checked, save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKIPPED = ("kind", "step", "seconds_left", "step_ms", "model_tflops_per_s", "base_rate", "always_f1")
LAST = ("gradient_norm", "learning_rate", "tokens_per_s", "mfu")  # drawn after the others


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw learning curves of one or several runs."""

    runs: Positional[tuple[Place, ...]]
    """Work directories of the runs."""
    out: Path
    """PNG, PDF or SVG file to write."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Plot, arguments, "plot", {})
    if not options.runs:
        raise UserError("plot: no run is given; name one or more, as in `python -m pretrain plot RUN --out x.png`")
    import_models()
    check_picture(options.out)
    print(save_picture(*curves(options.runs), options.out))
    return 0


def curves(runs: Sequence[Path]) -> tuple["Figure", dict, int]:
    """Draw one panel per metric, training thin and held-out thick, with a colour per run, or per corpus or task of a
    run that has several -> arguments of `save_picture`. UserError for a run without metrics."""
    from matplotlib.figure import Figure

    from pretrain.storage.journal import read_metrics
    from pretrain.storage.run_directory import RunDirectory

    measured = {run: {kind: read_metrics(RunDirectory(run), kind) for kind in ("train", "eval")} for run in runs}
    for run, kinds in measured.items():
        if not any(kinds.values()):
            raise UserError(f"{run}: has no metrics to plot; give the --workdir of a run")
    entries = [entry for kinds in measured.values() for kind in kinds.values() for entry in kind]
    keys = dict.fromkeys(name for entry in entries for name in entry if name not in SKIPPED)
    sources = list(dict.fromkeys(key.rpartition("/")[0] for key in keys))
    names = dict.fromkeys(key.rpartition("/")[2] for key in keys)
    names = [name for name in names if name not in LAST] + [name for name in LAST if name in names]
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure((4.5 * columns, 3 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for panel, name in zip(axes.flat, names, strict=False):
        _draw(panel, name, sources, measured)
    for panel in axes.flat[len(names) :]:
        panel.axis("off")
    drawn = (zip(*panel.get_legend_handles_labels(), strict=True) for panel in axes.flat)
    return figure, {label: handle for lines in drawn for handle, label in lines}, columns


def _draw(panel, name: str, sources: Sequence[str], curves: dict) -> None:
    """Draw the panel of one metric.   sources: prefixes of metrics, "" for those of the whole run."""
    ends = (["/".join(run.parts[-length:]) for run in curves] for length in itertools.count(1))  # of the runs' paths
    shortest = next(labels for labels in ends if len(set(labels)) == len(curves))
    named = zip(shortest, curves.values(), strict=True)
    for index, ((run_label, kinds), source) in enumerate(itertools.product(named, sources)):
        key, curve_label = (f"{source}/{name}", f"{run_label} {source}") if source else (name, run_label)
        for kind, style in (("train", {"alpha": 0.45, "linewidth": 1}), ("eval", {"marker": "o", "markersize": 3})):
            points = [(entry["step"], entry[key]) for entry in kinds[kind] if key in entry]
            label = curve_label if kind == "train" else f"{curve_label} held-out"
            if points:
                panel.plot(*zip(*points, strict=True), color=f"C{index}", label=label, **style)
    if name == "perplexity":
        panel.set_yscale("log")
    panel.set_title(name.replace("_", " "), fontsize="medium")
    panel.set_xlabel("step", fontsize="small")
    panel.grid(alpha=0.3)
