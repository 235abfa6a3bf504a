"""The time of a plan's operations by the instruction bundles that XLA:TPU schedules for them.

The planner counts cycles that XLA estimates before it generates code. The code itself can be dumped, a line for each
bundle, of which a core begins one in a cycle. The compiler then takes some four times as long, so this is for looking
into plans: `python -m benchmarks.plans --bundles`.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from data_pipelines.errors import UserError
from tpu.costs import Spent, spent
from tpu.estimate import Estimate, clocks, estimate, kernel_seconds
from tpu.generations import Tpu
from tpu.hlo import Module, Run, parse, runs
from tpu.kernel_costs import Cost
from tpu.overlap import timeline
from tpu.plan import Plan

# '  0x1f   : > { bundle }': an address, 'LB' where a loop begins, and '>' for each loop around it.
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*: ((?:> ?)*)\{")
_TURNS = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test")
_DUMPED = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")

Kind = tuple[float, str]  # operations of as many estimated cycles and the same results have the same program
Bundles = dict[Kind, float]


def dump_to(folder: Path) -> None:
    """Have libtpu write the final program of every operation there; to be called before it is loaded."""
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


def executed(lines: Iterable[str]) -> int | None:
    """Bundles that a program runs, of what stands under a condition all; None where a loop's turns are unknown."""
    levels: list[tuple[int, int | None]] = [(0, 1)]  # bundles and turns of the loops around a line, outermost first

    def close() -> None:
        bundles, turns = levels.pop()
        if turns is None:
            raise ValueError
        outer, its_turns = levels.pop()
        levels.append((outer + bundles * turns, its_turns))

    try:
        for line in lines:
            if match := _BUNDLE.match(line):
                depth = match[2].count(">")
                while len(levels) > depth + 1 or (match[1] == "LB" and len(levels) == depth + 1 > 1):
                    close()
                levels += [(0, None)] * (depth + 1 - len(levels))
                levels[-1] = levels[-1][0] + 1, levels[-1][1]
            if (test := _TURNS.search(line)) and len(levels) > 1:
                levels[-1] = levels[-1][0], int(test[1])
        while len(levels) > 1:
            close()
    except ValueError:
        return None
    return levels[0][0]


def read_bundles(folder: Path, module: Module, chip: Tpu) -> Bundles:
    """Of the module's operations, from the dump of its compilation, which is removed. XLA compiles one of equals.

    UserError for chips whose two cores share out the turns of an operation's loops, which the dump does not tell.
    """
    if chip.cores > 1:
        raise UserError("bundles are counted of chips with one core alone, as v5e's and v6e's")
    dumped = {}
    for path in folder.glob("*.*"):
        if match := _DUMPED.fullmatch(path.name):
            with path.open() as lines:
                dumped[match[1]] = executed(lines)
        path.unlink()
    found: Bundles = {}
    for run in runs(module):
        if dumped.get(run.instruction.name):
            found[_kind(module, run)] = dumped[run.instruction.name]
    return found


def estimate_by_bundles(planned: Plan, kernels: Mapping[str, Cost], bundles: Bundles) -> Estimate:
    """The plan's estimate with bundles, or the time of the bytes where that is longer, in place of estimated cycles,
    which remain where there are no bundles."""
    work, topology = planned.work, planned.topology
    module, chip = parse(planned.report.hlo), topology.device
    inside = kernel_seconds(planned.flops, work, topology, kernels)
    estimated = clocks(module, planned.costs, inside, work, topology)

    def seconds(run: Run) -> float:
        one, count = spent(module, run), bundles.get(_kind(module, run))
        if not one.cycles or count is None:
            return estimated.work(run)
        return estimated.work(run) - one.cycles / chip.clock + bound(count, one, chip)

    line = timeline(module, estimated._replace(work=seconds))
    return estimate(planned.costs, line, planned.flops, inside, work, topology)


def total(module: Module, bundles: Bundles) -> float:
    """Of all of a module's operations for which they are known."""
    return sum(bundles.get(_kind(module, run), 0) for run in runs(module))


def bound(bundles: float, one: Spent, chip: Tpu) -> float:
    """Seconds of an operation's bundles, or of its bytes where those are more."""
    return max(bundles / chip.clock, one.traffic / chip.hbm_bandwidth)


def _kind(module: Module, run: Run) -> Kind:
    return spent(module, run).cycles, run.instruction.shape
