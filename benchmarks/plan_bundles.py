"""A plan by the cycles that XLA estimates, and by the bundles that it schedules.

    python -m benchmarks.plan_bundles --plan 'bert-large --model.depth 3 --topology v6e:2x2' --kept FILE

The first time the bundles go to the file; then they are read from it, also for a plan of more layers: operations that
have the same cycles and results have the same program, and the others keep their cycles.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

from benchmarks.bundles import Kind, dump_to, estimate_by_bundles, read_bundles
from data_pipelines.command_line import end_with, parse
from models.attention.kernels.table import costs as kernel_costs
from pretrain.commands.options import CACHE
from pretrain.commands.planning import parse_plan, works
from tpu.compiler import prepare
from tpu.estimate import Estimate
from tpu.hlo import parse as parse_hlo
from tpu.plan import Plan, plan
from tpu.topologies import parse_topology


@dataclasses.dataclass(frozen=True)
class Options:
    """Print a plan by estimated cycles and by scheduled bundles."""

    plan: str
    """Arguments of `tpu plan`, all of them quoted."""
    kept: Path
    """JSON: the bundles. Written where there is none, by a compilation that takes some four times as long."""
    cache: Path = CACHE
    """Where the compiler's other answers are kept."""


def main(arguments: list[str]) -> int:
    options = parse(Options, arguments, "python -m benchmarks.plan_bundles")
    with tempfile.TemporaryDirectory() as folder:
        counted = options.kept.exists()
        if not counted:
            dump_to(Path(folder))
        prepare()
        planned = _planned(options.plan, options.cache if counted else Path(folder, "answers"))
        if not counted:
            found = read_bundles(Path(folder), parse_hlo(planned.report.hlo), planned.topology.device)
            options.kept.write_text(json.dumps([[*kind, bundles] for kind, bundles in found.items()]))
    kept = json.loads(options.kept.read_text())
    bundles: dict[Kind, float] = {(cycles, shape): count for cycles, shape, count in kept}
    print("| by | step ms | cores ms | of it kernels | waits ms | MFU |\n|---|---|---|---|---|---|")
    print(_line("XLA's cycles", planned, planned.estimate))
    print(_line("bundles", planned, estimate_by_bundles(planned, kernel_costs(), bundles)))
    return 0


def _planned(arguments: str, cache: Path) -> Plan:
    recipe, target = parse_plan(arguments.split())
    topology = parse_topology(target.topology)
    work, _ = next(works(recipe, target, topology))
    planned = plan(work, topology, kernel_costs(), cache)
    if planned.estimate is None or planned.estimate.seconds is None:
        raise SystemExit(f"{arguments}: {planned.estimate or planned.report.needed}")
    return planned


def _line(by: str, planned: Plan, step: Estimate) -> str:
    times = (f"{1000 * n:.3g}" for n in (step.seconds, step.compute, step.kernels, step.exposed))
    return f"| {by} | {' | '.join(times)} | {planned._replace(estimate=step).mfu:.1%} |"


if __name__ == "__main__":
    end_with(main)
