"""Show plans as tables on the screen and as Markdown."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_pipelines.errors import UserError
from tpu.costs import short_source
from tpu.estimate import Estimate
from tpu.generations import GIB
from tpu.plan import MARGIN, Largest, Plan

LISTED = 10  # how many operations and collectives to list, the largest first
PARTIAL = "plans.partial.md"
# How far estimates are from published measurements: TPU generation, and the ratio of estimated to measured share of the
# peak, by `python -m benchmarks.plans calibration`; benchmarks/results/plans.md says what was measured.
RATIOS = {
    "layers of MaxText's 32B on 64 chips": ("v5p", 1.10),
    "layers of Llama2-70B on 64 chips": ("v5p", 1.03),
    "layers of MaxText's 32B on 256 chips": ("v5e", 0.90),
    "layers of Llama3.1-8B on 8 chips": ("v6e", 0.73),
    "a product of 8,192^3": ("v6e", 0.87),
}


def show(title: str, planned: Plan) -> None:
    """Print a plan in full."""
    console = _console()
    console.print(f"\n[bold]{title}[/bold]", highlight=False)
    console.print(_memory(planned))
    console.print(_work(planned))
    if planned.collectives:
        console.print(_collectives(planned))
        console.print(_largest_collectives(planned))
    if planned.costs:
        console.print(_sources(planned))


def show_largest(largest: Largest, planned: Plan) -> None:
    """Print the result of `largest_batch`."""
    if largest.rows == 0:
        said = "no batch fits: cut the parameters (--mesh fsdp=...) or the activations (--remat full, --microbatches)"
    else:
        more = "" if largest.full else " (perhaps more: memory does not grow linearly with the batch)"
        said = f"largest batch that fits: {largest.rows} rows of {planned.work.length}{more}"
    _console().print(said, highlight=False)


def _console() -> Console:
    """Return a console that is wide outside of a terminal, so that a pipe or a log gets whole rows."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _memory(planned: Plan) -> Table:
    table = _table(f"HBM per {planned.topology.unit}", "", "GiB", "share")
    rows = dict(planned.parts)
    if planned.report.needed is None:
        report = planned.report
        rows["padding of arguments"] = report.arguments - sum(planned.parts.values())
        rows["activations and temporaries"] = report.temporaries + report.outputs - report.aliased
        rows["program"] = report.code
    for name, size in rows.items():
        table.add_row(name, f"{size / GIB:.3f}", f"{size / planned.capacity:.1%}")
    table.add_section()
    if planned.work.ahead:
        held = planned.work.ahead * planned.parts["batch"]
        table.add_row(f"{planned.work.ahead} batches ahead", f"{held / GIB:.3f}", f"{held / planned.capacity:.1%}")
    for name, size in planned.moments.items():
        verdict = "fits" if size <= planned.room else "DOES NOT FIT"
        total = f"{name}, of {planned.capacity / GIB:.2f} less {MARGIN:.0%}: {verdict}"
        table.add_row(total, f"{size / GIB:.3f}", f"{size / planned.capacity:.1%}")
    return table


def _work(planned: Plan) -> Table:
    """Return a table with FLOPs, bytes and the estimate."""
    table = _table("One step", "", "")
    work, unit = planned.work, planned.topology.unit
    needed = f"{planned.flops.total / work.devices:.3e}"
    table.add_row(f"model FLOPs per {unit}", f"{work.model_flops / work.devices:.3e}")
    table.add_row(f"FLOPs of the program per {unit}, recomputation included", needed)
    if planned.costs:
        table.add_row(f"bytes to and from HBM per {unit}", f"{planned.costs.traffic:.3e}")
    for name, text in figures(planned).items():
        table.add_row(name, text)
    if planned.data_loops:
        table.add_row("loops whose length depends on the data, counted as one iteration", str(planned.data_loops))
    compiled = f"{planned.report.seconds:.0f} s" + (" (kept from an earlier plan)" if planned.report.cached else "")
    table.add_row("compilation", compiled)
    return table


def figures(planned: Plan) -> dict[str, str]:
    """Return the estimate as names and texts; 'no estimate' and the reason if there is none."""
    estimate = planned.estimate
    if estimate is None:
        return {"estimate": "no estimate: it does not fit"}
    if estimate.seconds is None:
        return {"estimate": f"no estimate: {estimate.why_not}"}
    ms = lambda seconds: f"{1000 * seconds:.3g}"
    kernels = f" ({ms(estimate.kernels)} of them in kernels, by counted bundles)" if estimate.kernels else ""
    return {
        "estimated step time": f"{ms(estimate.seconds)} ms",
        "  cores": f"{ms(estimate.compute)} ms{kernels}",
        "  HBM": f"{ms(estimate.memory)} ms",
        "  collectives": f"{ms(estimate.collectives)} ms, of which the cores wait {ms(estimate.exposed)} ms",
        "estimated tokens/s": f"{planned.tokens_per_second:,.0f}",
        "estimated MFU": f"{planned.mfu:.1%} ({_span(planned)}, by comparison with published measurements)",
    }


def _span(planned: Plan) -> str:
    """Return the MFU's range, '45 to 59'; 'up to 59' or 'down to 45' if all measurements deviate to one side."""
    least, most = span(planned.mfu, planned.topology.generation)

    def percent(share):
        return f"{100 * share:.0f}" if share >= 0.095 else f"{100 * share:.1g}"

    if least == planned.mfu:
        return f"up to {percent(most)}"
    return f"down to {percent(least)}" if most == planned.mfu else f"{percent(least)} to {percent(most)}"


def span(estimated: float, generation: str) -> tuple[float, float]:
    """Return (least, most): the range of the measured share of the peak for an estimated one, by the extreme ratios of
    the generation, or of all generations if none is known for it.
    """
    ratios = [ratio for name, ratio in RATIOS.values() if name == generation]
    ratios = ratios or [ratio for _, ratio in RATIOS.values()]
    return estimated / max(1.0, *ratios), min(estimated / min(1.0, *ratios), 1.0)


def _collectives(planned: Plan) -> Table:
    unit = planned.topology.unit
    columns = ("kind", f"{unit}s", "runs", "MB", "ms", "ms cores wait")
    table = _table(f"Collectives per step and {unit}", *columns)
    sums: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for collective, seconds, exposed in planned.collectives:
        row = sums[collective.kind, collective.group]
        for index, value in enumerate((collective.times, collective.bytes, seconds, exposed)):
            row[index] += value
    for (kind, group), (times, size, seconds, exposed) in sorted(sums.items()):
        row = (str(group), str(times), f"{size / 1e6:.2f}", f"{1000 * seconds:.3g}", f"{1000 * exposed:.3g}")
        table.add_row(kind, *row)
    return table


def _largest_collectives(planned: Plan) -> Table:
    table = _table("Longest collectives", "kind", "MB", "runs", "ms", "ms cores wait", "largest array", "source")
    for collective, seconds, exposed in sorted(planned.collectives, key=lambda timed: -timed.seconds)[:LISTED]:
        array = max(collective.arrays, key=lambda a: a.bytes)
        shape = f"{array.dtype}{list(array.dims)}" + (" and others" if len(collective.arrays) > 1 else "")
        size, ms, waited = f"{collective.bytes / 1e6:.2f}", f"{1000 * seconds:.3g}", f"{1000 * exposed:.3g}"
        row = (size, str(collective.times), ms, waited, shape, short_source(collective.source))
        table.add_row(collective.kind, *row)
    return table


def _sources(planned: Plan) -> Table:
    table = _table("Where the cores' time goes", "operation", "ms", "share")
    clock = planned.topology.device.clock
    for name, cycles in list(planned.costs.sources.items())[:LISTED]:
        table.add_row(name, f"{1000 * cycles / clock:.2f}", f"{cycles / planned.costs.cycles:.1%}")
    return table


# Column -> its text for a plan, with an estimate or without.
_COLUMNS = {
    "slice": lambda p: f"{p.topology} ({p.topology.cloud})",
    "mesh": lambda p: p.work.mesh,
    "batch": lambda p: f"{p.work.rows} x {p.work.length}",
    "HBM, GiB": lambda p: f"{p.needed / GIB:.2f} of {p.capacity / GIB:.2f}" + ("" if p.fits else ": too much"),
    "TFLOPs/device": lambda p: f"{p.flops.total / p.work.devices / 1e12:.2f}",
    "collectives, MB/device": lambda p: f"{sum(timed.collective.bytes for timed in p.collectives) / 1e6:.0f}",
    "step, ms": lambda p: _or_none(p, lambda: f"{1000 * p.estimate.seconds:.3g}"),
    "cores (kernels), HBM, waits, ms": lambda p: _or_none(p, lambda: _limits(p.estimate)),
    "tokens/s": lambda p: _or_none(p, lambda: f"{p.tokens_per_second:,.0f}"),
    "MFU": lambda p: _or_none(p, lambda: f"{p.mfu:.0%} ({_span(p)})"),
    "compilation, s": lambda p: f"{p.report.seconds:.0f}",
}
_NOTE = (
    "Step time, tokens/s and MFU are estimates of XLA's TPU compiler, not measurements. "
    "A device is a chip, or half a chip of v2, v3 and v7x. "
    "Brackets show the MFU's range by the largest deviations of estimates from published measurements. "
    "A step takes the longer of the cores' time (kernels are part of it) and HBM's time, plus the time that the cores "
    "wait for collectives."
)


def _limits(estimate: Estimate) -> str:
    """Return '142 (12.7), 54.1, 5.2': the time of cores (kernels in it), HBM and waiting for collectives, in ms."""
    compute, kernels, memory, exposed = (
        f"{1000 * seconds:.3g}" for seconds in (estimate.compute, estimate.kernels, estimate.memory, estimate.exposed)
    )
    return f"{compute} ({kernels}), {memory}, {exposed}"


def _or_none(planned: Plan, text) -> str:
    return text() if planned.mfu is not None else "no estimate"


def markdown(rows: Sequence[tuple[str, Plan | str]]) -> str:
    """Return a Markdown table.   rows: (recipe, its plan or why there is none)."""
    lines = [f"| recipe | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for recipe, planned in rows:
        cells = [planned] + [""] * (len(_COLUMNS) - 1)
        if isinstance(planned, Plan):
            cells = [text(planned) for text in _COLUMNS.values()]
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _NOTE, ""])


def make(folder: Path) -> None:
    """Create a folder for plans; raises UserError if it is not writable."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PARTIAL).touch()


def write(rows: Sequence[tuple[str, Plan | str]], folder: Path) -> None:
    """Write plans.md into a folder from `make`; raises UserError if that fails."""
    with _writing(folder):
        (folder / PARTIAL).write_text(markdown(rows))
        (folder / PARTIAL).replace(folder / "plans.md")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"--out {folder}: cannot write there ({why}); choose another folder") from None
