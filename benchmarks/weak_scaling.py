"""What more chips cost at the same rows a chip: `tpu plan` of a recipe on 8 chips and on 1,024, of one slice or four.

    python -m benchmarks.weak_scaling [--only v5p v5e v6e] [--recipe 'bert-large --model.depth 3'] [--cache DIR]

As published, on the meshes that the project chooses. Estimates of Google's compiler, the network between slices
counted; nothing is measured.
"""

import dataclasses
import math
import re
from pathlib import Path

from data_pipelines.command_line import end_with, parse, unknown
from data_pipelines.errors import UserError
from models.attention.kernels.table import costs
from pretrain.commands.options import CACHE
from pretrain.commands.planning import parse_plan, works
from tpu.compiler import prepare
from tpu.plan import Plan, plan
from tpu.topologies import parse_topology

# Generation -> rows of 512 tokens on each chip, and the slices that are compared with the first, each with its mesh.
SCALES = {
    "v5p": (64, {"v5p:2x2x2": "data=8", "v5p:8x8x16": "data=1024"}),
    "v5e": (16, {"v5e:2x4": "data=8", "v5e:16x16": "slice=4,data=16,fsdp=16"}),
    "v6e": (64, {"v6e:2x4": "data=8", "v6e:16x16": "slice=4,data=16,fsdp=16"}),
}
LENGTH = 512


@dataclasses.dataclass(frozen=True)
class Options:
    """Print estimates of the same rows a chip on few and on many chips."""

    only: tuple[str, ...] = tuple(SCALES)
    """Generations."""
    recipe: str = "bert-large"
    """With its fields as options, all of it quoted: 'bert-large --model.depth 3'."""
    cache: Path = CACHE
    """Where the compiler's answers are kept."""

    def __post_init__(self):
        for generation in self.only:
            if generation not in SCALES:
                raise UserError(unknown("--only: unknown generation", generation, SCALES))


def main(arguments: list[str]) -> int:
    """Print the table row by row -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.weak_scaling")
    prepare()
    print("| chips | mesh | rows | step ms | of the first | waits ms | MB summed or moved a chip | MFU | compiled s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for generation in options.only:
        rows, slices = SCALES[generation]
        first = None
        for topology, mesh in slices.items():
            planned = planned_for(options.recipe.split(), topology, mesh, rows, options.cache)
            first = first or planned
            print(line(planned, first), flush=True)
    return 0


def planned_for(recipe: list[str], topology: str, mesh: str, rows: int, cache: Path) -> Plan:
    """A recipe's plan with so many rows on each chip."""
    chips = math.prod(int(size) for size in re.findall(r"=(\d+)", mesh))
    shape = f"--batch-size {rows * chips} --sequence-length {LENGTH} --topology {topology} --mesh {mesh}"
    changed, target = parse_plan([*recipe, *shape.split()])
    found = parse_topology(target.topology)
    work, _ = next(works(changed, target, found))
    return plan(work, found, costs(), cache)


def line(planned: Plan, first: Plan) -> str:
    """A row of the table."""
    work, step = planned.work, planned.estimate
    where = f"{work.devices} of {planned.topology}"
    if step is None or step.seconds is None:
        return f"| {where} | {work.mesh} | {work.rows} | {step.why_not if step else 'does not fit'} |"
    moved = sum(timed.collective.bytes for timed in planned.collectives) / 1e6
    cells = (f"{1000 * step.seconds:.1f}", f"{step.seconds / first.estimate.seconds:.3f}", f"{1000 * step.exposed:.2f}")
    rest = f"{moved:.0f} | {planned.mfu:.1%} | {planned.report.seconds:.0f}"
    return f"| {where} | {work.mesh} | {work.rows} | {' | '.join(cells)} | {rest} |"


if __name__ == "__main__":
    end_with(main)
