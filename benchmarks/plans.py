"""What `tpu plan` estimates, beside what was measured, beside fewer chips, and by the bundles that XLA:TPU schedules.

    python -m benchmarks.plans calibration [--only NAME ...]     # square products, and layers as of published runs
    python -m benchmarks.plans scaling [--only v5p v5e v6e] [--recipe 'bert-large --model.depth 3']
    python -m benchmarks.plans t5 [--only t5-large@v5p:4x4x4 ...]    # T5 as published
    python -m benchmarks.plans 'bert-large --model.depth 3 --topology v6e:2x2' --bundles FILE     # any plan

The published runs are MaxText's (its README and its configurations, and AI-Hypercomputer/tpu-recipes). Their layers are
built of our decoder: a gated feed-forward of width F and keys of fewer heads, of width K in all, become one of two
matrices of width 1.5 F - (W - K), of as many FLOPs. Compared is the share of the peak that all computed FLOPs reach,
what is computed again included, since they keep other activations than we do.
Scaling has the same rows a chip on 8 chips and on 1,024, of one slice or four, on the meshes that the project chooses,
the network between slices counted. But for what was published nothing is measured.

--bundles has a second row for each plan. The first time the bundles go to its file, by a compilation that takes some
four times as long; then they are read from it, also for a plan of more layers: operations that have the same cycles and
results have the same program, and the others keep their cycles.
"""

import dataclasses
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import SingleDeviceSharding

from benchmarks.bundles import Bundles, dump_to, estimate_by_bundles, read_bundles, total
from data_pipelines.command_line import end_with, parse, unknown
from data_pipelines.errors import UserError
from pretrain.commands.arguments import CACHE
from pretrain.commands.planning import parse_plan, works
from tpu.compiler import compile_for_tpu, devices, prepare
from tpu.costs import costs
from tpu.estimate import Estimate
from tpu.hlo import Module
from tpu.hlo import parse as parse_hlo
from tpu.kernel_costs import COSTS
from tpu.plan import Plan, plan
from tpu.topologies import Topology, parse_topology
from tpu.xla import platform_options


class Case(NamedTuple):
    """arguments: of `tpu plan`.   measured: share of the peak that all FLOPs of its steps reach.
    first: name of the case whose step stands beside it."""

    arguments: str
    measured: float | None = None
    first: str = ""


_COMMON = "--model.dropout 0 --model.attention-dropout 0 --remat full --depth scan --no-largest"
_32B = f"gpt2-xl --model.width 8192 --model.heads 64 --model.feed-forward 43008 --model.depth 32 {_COMMON}"
_70B = f"gpt2-xl --model.width 8192 --model.heads 64 --model.feed-forward 35840 --model.depth 80 {_COMMON}"
_8B = f"gpt2-xl --model.width 4096 --model.heads 32 --model.feed-forward 18432 --model.depth 32 {_COMMON}"


def _on(topology: str, chips: int, rows: int, length: int, vocab: int) -> str:
    size = f"--model.vocab-size {vocab} --model.positions {length} --sequence-length {length}"
    return f"--topology {topology} --mesh fsdp={chips} --batch-size {rows * chips} {size}"


# Measured: the share of model FLOPs, a causal mask's counted as half of all pairs (of all, as tables print it, 66.9%,
# 71.5%, 65.4% and 45.0%), times the FLOPs that the steps computed as a multiple of those.
PUBLISHED = {
    "32B on v5e-256": Case(f"{_32B} {_on('v5e:16x16', 256, 4, 2048, 32000)}", 0.658 * 4 / 3),
    "32B on v5p-128": Case(f"{_32B} {_on('v5p:4x4x4', 64, 7, 2048, 32000)}", 0.703 * 1.005),
    "Llama2-70B on v5p": Case(f"{_70B} {_on('v5p:4x4x4', 64, 4, 4096, 32000)}", 0.630 * 1.19),
    "Llama3.1-8B on v6e-8": Case(f"{_8B} {_on('v6e:2x4', 8, 3, 8192, 128256)}", 0.400 * 1.22),
}
T5 = {
    f"{recipe}@{topology}": Case(f"{recipe} --topology {topology} --no-largest")
    for recipe, topologies in {
        "t5-base": ("v5p:4x4x4", "v5e:16x16"),
        "t5-large": ("v5p:4x4x4", "v5e:16x16"),
        "t5-3b": ("v5p:4x4x4",),
        "t5-11b": ("v5p:4x4x4",),
    }.items()
    for topology in topologies
}
SQUARES = {"v4": None, "v5e": None, "v5p": None, "v6e": 0.90}  # measured share of the peak, where it is published
SIDE = 8192
# Generation -> rows of 512 tokens on each chip, and the slices that are compared with the first, each with its mesh.
SCALES = {
    "v5p": (64, {"v5p:2x2x2": "data=8", "v5p:8x8x16": "data=1024"}),
    "v5e": (16, {"v5e:2x4": "data=8", "v5e:16x16": "slice=4,data=16,fsdp=16"}),
    "v6e": (64, {"v6e:2x4": "data=8", "v6e:16x16": "slice=4,data=16,fsdp=16"}),
}
LENGTH = 512
GROUPS = {"calibration": (*SQUARES, *PUBLISHED), "scaling": tuple(SCALES), "t5": tuple(T5)}
HEAD = (
    "| plan | mesh | rows | by | step ms | of the first | cores ms | of it kernels | waits ms | MB moved a chip | MFU "
    "| of the peak | measured | estimated / measured | compiled s |\n" + "|---" * 15 + "|"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Print estimates."""

    what: Annotated[str, tyro.conf.Positional]
    """calibration, scaling, t5, or the arguments of `tpu plan`, all of them quoted."""
    only: tuple[str, ...] = ()
    """Of calibration: generations for square products, and runs; of scaling: generations; of t5: plans. All by
    default."""
    recipe: str = "bert-large"
    """Of scaling, with its fields as options, all of it quoted: 'bert-large --model.depth 3'."""
    bundles: Path | None = None
    """JSON: the bundles. Written where there is none."""
    cache: Path = CACHE
    """Where the compiler's answers are kept, but those of a compilation that dumps bundles."""

    def __post_init__(self):
        for name in self.only:
            if name not in GROUPS.get(self.what, ()):
                raise UserError(unknown("--only: unknown", name, GROUPS.get(self.what, ())))


class Compiler(NamedTuple):
    """cache: of its answers.   dump: where it writes bundles.   known: bundles by generation, None unless asked for."""

    cache: Path
    dump: Path | None
    known: dict[str, Bundles] | None

    def bundles(self, module: Module, topology: Topology) -> Bundles:
        """Those of what was just compiled, or of what is known."""
        of = self.known.setdefault(topology.generation, {})
        if self.dump:
            of |= read_bundles(self.dump, module, topology.device)
        return of


def main(arguments: list[str]) -> int:
    """Print the table row by row -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.plans")
    with tempfile.TemporaryDirectory() as folder:
        compiler = _compiler(options, Path(folder))
        prepare()
        print(HEAD)
        first = {}
        for name in (options.only or SQUARES) if options.what == "calibration" else ():
            if name in SQUARES:
                print("\n".join(square(name, compiler)), flush=True)
        for name, case in cases(options).items():
            planned = planned_for(case, compiler.cache)
            if planned.estimate is None or planned.estimate.seconds is None:
                why = planned.estimate.why_not if planned.estimate else "does not fit"
                print(f"| {name} | {planned.work.mesh} | {planned.work.rows} | {why} |" + " |" * 11, flush=True)
                continue
            for by, step in estimates(planned, compiler):
                first.setdefault((name, by), step)
                print(line(name, by, planned, step, case.measured, first.get((case.first, by))), flush=True)
        if compiler.dump:
            options.bundles.write_text(json.dumps({name: [*of.items()] for name, of in compiler.known.items()}))
    return 0


def _compiler(options: Options, folder: Path) -> Compiler:
    if options.bundles is None:
        return Compiler(options.cache, None, None)
    if options.bundles.exists():
        kept = json.loads(options.bundles.read_text())
        known = {name: {(cycles, shape): count for (cycles, shape), count in of} for name, of in kept.items()}
        return Compiler(options.cache, None, known)
    dump_to(folder / "dump")
    return Compiler(folder / "answers", folder / "dump", {})


def cases(options: Options) -> dict[str, Case]:
    """Those that the options choose, by their names."""
    if listed := {"calibration": PUBLISHED, "t5": T5}.get(options.what):
        return {name: case for name, case in listed.items() if name in (options.only or listed)}
    if options.what != "scaling":
        return {options.what: Case(options.what)}
    found = {}
    for generation in options.only or SCALES:
        rows, slices = SCALES[generation]
        first = next(iter(slices))
        for topology, mesh in slices.items():
            chips = math.prod(int(size) for size in re.findall(r"=(\d+)", mesh))
            shape = f"--batch-size {rows * chips} --sequence-length {LENGTH} --topology {topology} --mesh {mesh}"
            found[topology] = Case(f"{options.recipe} {shape}", first=first)
    return found


def planned_for(case: Case, cache: Path) -> Plan:
    recipe, target = parse_plan(case.arguments.split())
    topology = parse_topology(target.topology)
    work, _ = next(works(recipe, target, topology))
    return plan(work, topology, COSTS, cache)


def estimates(planned: Plan, compiler: Compiler) -> Iterator[tuple[str, Estimate]]:
    """By what it counts -> the plan's estimate."""
    yield "cycles", planned.estimate
    if compiler.known is not None:
        bundles = compiler.bundles(parse_hlo(planned.report.hlo), planned.topology)
        yield "bundles", estimate_by_bundles(planned, COSTS, bundles)


def line(name: str, by: str, planned: Plan, step: Estimate, measured: float | None, first: Estimate | None) -> str:
    """A row of the table."""
    work, beside = planned.work, f"{step.seconds / first.seconds:.3f}" if first else ""
    times = " | ".join(f"{1000 * seconds:.2f}" for seconds in (step.compute, step.kernels, step.exposed))
    moved = sum(timed.collective.bytes for timed in planned.collectives) / 1e6
    share = planned.flops.total / (step.seconds * planned.topology.device.peak_flops * work.devices)
    mfu, compared = f"{planned._replace(estimate=step).mfu:.1%}", _compared(share, measured)
    cells = f"{name} | {work.mesh} | {work.rows} | {by} | {1000 * step.seconds:.1f} | {beside} | {times}"
    return f"| {cells} | {moved:.0f} | {mfu} | {compared} | {planned.report.seconds:.0f} |"


def _compared(share: float, measured: float | None) -> str:
    return f"{share:.1%} | " + (f"{measured:.1%} | {share / measured:.2f}" if measured else " |")


def square(generation: str, compiler: Compiler) -> list[str]:
    """Rows of the table for one product of square bfloat16 matrices."""
    topology = parse_topology(f"{generation}:1x1" if generation in ("v5e", "v6e") else f"{generation}:2x2x1")
    place = SingleDeviceSharding(devices(topology)[0])
    matrix = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16, sharding=place)
    options = platform_options("tpu")
    lowered = jax.jit(jnp.matmul, compiler_options=options).lower(matrix, matrix)
    module = parse_hlo(compile_for_tpu(lowered, options, topology, compiler.cache).hlo)
    found, chip = costs(module), topology.device
    counts = {"cycles": found.cycles}
    if compiler.known is not None:
        counts["bundles"] = total(module, compiler.bundles(module, topology))
    seconds = {by: max(count / chip.clock, found.traffic / chip.hbm_bandwidth) for by, count in counts.items()}
    return [
        f"| {SIDE}^3 on {generation} | | | {by} | {1000 * taken:.1f} | | | | | | "
        f"| {_compared(2 * SIDE**3 / (taken * chip.peak_flops), SQUARES[generation])} | |"
        for by, taken in seconds.items()
    ]


if __name__ == "__main__":
    end_with(main)
