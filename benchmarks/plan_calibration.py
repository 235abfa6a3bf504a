"""What `tpu plan` estimates beside what was measured: square products, and layers like those of published runs.

    python -m benchmarks.plan_calibration [--only NAME ...] [--bundles] [--cache DIR]

The published runs are MaxText's (its README and its configurations, and AI-Hypercomputer/tpu-recipes). Their layers are
built of our decoder: a gated feed-forward of width F and keys of fewer heads, of width K in all, become one of two
matrices of width 1.5 F - (W - K), of as many FLOPs. Compared is the share of the peak that all computed FLOPs reach,
what is computed again included, since they keep other activations than we do.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.bundles import dump_to, estimate_by_bundles, read_bundles
from data_pipelines.command_line import end_with, parse
from models.attention.kernels.table import costs as kernel_costs
from pretrain.commands.options import CACHE
from pretrain.commands.planning import parse_plan, works
from tpu.compiler import compile_for_tpu, devices, prepare
from tpu.costs import costs
from tpu.hlo import parse as parse_hlo
from tpu.plan import plan
from tpu.topologies import parse_topology
from tpu.xla import platform_options


class Published(NamedTuple):
    """measured: share of the peak of its model FLOPs, a causal mask's counted as half of all pairs.
    again: FLOPs that its steps computed, as a multiple of those.   arguments: of `tpu plan`, for layers of as many
    FLOPs and rows a chip.
    """

    measured: float
    again: float
    arguments: str


_COMMON = "--model.dropout 0 --model.attention-dropout 0 --remat full --depth scan --no-largest"
_32B = f"gpt2-xl --model.width 8192 --model.heads 64 --model.feed-forward 43008 --model.depth 32 {_COMMON}"
_70B = f"gpt2-xl --model.width 8192 --model.heads 64 --model.feed-forward 35840 --model.depth 80 {_COMMON}"
_8B = f"gpt2-xl --model.width 4096 --model.heads 32 --model.feed-forward 18432 --model.depth 32 {_COMMON}"


def _rows(length: int, rows: int, vocab: int) -> str:
    size = f"--model.vocab-size {vocab} --model.positions {length}"
    return f"{size} --sequence-length {length} --batch-size {rows}"


RUNS = {
    # From tables that count all pairs: 66.9%, 71.5%, 65.4% and 45.0% as printed.
    "32B on v5e-256": Published(
        0.658, 4 / 3, f"{_32B} --topology v5e:16x16 --mesh fsdp=256 {_rows(2048, 4 * 256, 32000)}"
    ),
    "32B on v5p-128": Published(
        0.703, 1.005, f"{_32B} --topology v5p:4x4x4 --mesh fsdp=64 {_rows(2048, 7 * 64, 32000)}"
    ),
    "Llama2-70B on v5p": Published(
        0.630, 1.19, f"{_70B} --topology v5p:4x4x4 --mesh fsdp=64 {_rows(4096, 4 * 64, 32000)}"
    ),
    "Llama3.1-8B on v6e-8": Published(
        0.400, 1.22, f"{_8B} --topology v6e:2x4 --mesh fsdp=8 {_rows(8192, 3 * 8, 128256)}"
    ),
}
SQUARES = {"v4": None, "v5e": None, "v5p": None, "v6e": 0.90}  # measured share of the peak, where it is published
SIDE = 8192


@dataclasses.dataclass(frozen=True)
class Options:
    """Print the planner's estimates beside published measurements."""

    only: tuple[str, ...] = (*SQUARES, *RUNS)
    """Generations for square products, and runs."""
    bundles: bool = False
    """By the bundles that XLA schedules, not by the cycles that it estimates before."""
    cache: Path = CACHE
    """Where the compiler's answers are kept, but those of --bundles."""


def main(arguments: list[str]) -> int:
    options = parse(Options, arguments, "python -m benchmarks.plan_calibration")
    with tempfile.TemporaryDirectory() as folder:
        dump, cache = None, options.cache
        if options.bundles:
            dump, cache = Path(folder, "dump"), Path(folder, "answers")
            dump_to(dump)
        prepare()
        print("| | estimated | measured | estimated / measured |\n|---|---|---|---|")
        for name in options.only:
            if name in SQUARES:
                title, estimated, measured = f"{SIDE}^3 on {name}", square(name, cache, dump), SQUARES[name]
            else:
                published = RUNS[name]
                title, estimated, measured = name, run(published, cache, dump), published.measured * published.again
            beside = f"{measured:.1%} | {estimated / measured:.2f}" if measured else "not published |"
            print(f"| {title} | {estimated:.1%} | {beside} |", flush=True)
    return 0


def square(generation: str, cache: Path, dump: Path | None) -> float:
    """Share of the peak of one product of square bfloat16 matrices, by its bundles where they are dumped."""
    topology = parse_topology(f"{generation}:1x1" if generation in ("v5e", "v6e") else f"{generation}:2x2x1")
    place = SingleDeviceSharding(devices(topology)[0])
    matrix = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16, sharding=place)
    options = platform_options("tpu")
    product = jax.jit(jnp.matmul, compiler_options=options)
    module = parse_hlo(compile_for_tpu(product.lower(matrix, matrix), options, topology, cache).hlo)
    found, chip = costs(module), topology.device
    cycles = sum(read_bundles(dump, module, chip).values()) if dump else found.cycles
    return 2 * SIDE**3 / (max(cycles / chip.clock, found.traffic / chip.hbm_bandwidth) * chip.peak_flops)


def run(published: Published, cache: Path, dump: Path | None) -> float:
    """Share of the peak that all FLOPs of a step reach, by bundles where they are dumped."""
    recipe, target = parse_plan(published.arguments.split())
    topology = parse_topology(target.topology)
    work, _ = next(works(recipe, target, topology))
    planned = plan(work, topology, kernel_costs(), cache)
    if planned.estimate is None or planned.estimate.seconds is None:
        raise SystemExit(f"{published.arguments}: {planned.estimate or planned.report.needed}")
    step = planned.estimate
    if dump:
        bundles = read_bundles(dump, parse_hlo(planned.report.hlo), topology.device)
        step = estimate_by_bundles(planned, kernel_costs(), bundles)
    return planned.flops.total / (step.seconds * topology.device.peak_flops * work.devices)


if __name__ == "__main__":
    end_with(main)
