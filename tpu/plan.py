"""A train step on a slice of TPUs, before there is one: memory, collectives, time; the largest batch that fits."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from models.attention.kernels.kernel import Cost
from tpu import hlo
from tpu.chips import TPUS
from tpu.compiler import Report, compile_for_tpu
from tpu.costs import Costs, collective_seconds, costs
from tpu.flops import Flops, flops
from tpu.hlo import Collective
from tpu.rules import shard_bytes
from tpu.topologies import Topology


class Work(NamedTuple):
    """A step to plan.

    step: jitted.   arguments: of it, shapes with shardings.   parts: 'parameters', 'optimizer', 'batch', ... -> the
    arguments' leaves that they name.   mesh, chips: its shape in words and its size.   rows: of a batch, a multiple of
    rows_multiple.   length: tokens per row.   model_flops: of one step, without recomputation, over all chips.
    checkpoint: bytes per chip that writing a checkpoint takes beside the arguments, between two steps.
    """

    step: Any
    arguments: tuple
    parts: Mapping[str, Any]
    mesh: str
    chips: int
    rows: int
    rows_multiple: int
    length: int
    model_flops: float
    checkpoint: int


class Estimate(NamedTuple):
    """seconds: of a step, the sum of what cannot overlap.   compute, memory, collectives: seconds of each alone.
    kernels: seconds of `compute` that are arithmetic, not the compiler's.   exposed: seconds of the collectives that
    nothing runs beside.   why_not: '' or why seconds is None.
    """

    seconds: float | None
    compute: float
    kernels: float
    memory: float
    collectives: float
    exposed: float
    why_not: str = ""


class Plan(NamedTuple):
    """Per chip, sizes in bytes.   parts: of the arguments.   costs, collectives, estimate: None if it does not fit.

    data_loops: loops that the data end, of which one turn is counted.
    """

    topology: Topology
    work: Work
    report: Report
    parts: dict[str, int]
    flops: Flops
    costs: Costs | None
    collectives: list[Collective]
    estimate: Estimate | None
    data_loops: int = 0

    @property
    def capacity(self) -> float:
        return TPUS[self.topology.generation].hbm

    @property
    def during_checkpoint(self) -> int:
        """What a chip holds while a checkpoint is written."""
        return sum(self.parts.values()) + self.work.checkpoint

    @property
    def needed(self) -> float:
        """The most that a chip has to hold, in a step or between two."""
        return max(self.report.total, self.during_checkpoint)

    @property
    def fits(self) -> bool:
        return self.report.needed is None and self.needed <= self.capacity

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self.estimate and self.estimate.seconds
        return self.work.rows * self.work.length / seconds if seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what all chips could do in the estimated time."""
        seconds = self.estimate and self.estimate.seconds
        peak = TPUS[self.topology.generation].peak_flops * self.work.chips
        return self.work.model_flops / (seconds * peak) if seconds else None


def plan(work: Work, topology: Topology, kernels: Mapping[str, Cost], cache: Path) -> Plan:
    """Compile a step for a slice and read what it will do."""
    traced = work.step.trace(*work.arguments)
    report = compile_for_tpu(traced.lower(), topology, cache)
    parts = {name: shard_bytes(tree) for name, tree in work.parts.items()}
    counted = flops(traced.jaxpr, kernels)
    if not report.hlo:
        return Plan(topology, work, report, parts, counted, None, [], None)
    module = hlo.parse(report.hlo)
    try:
        found, moved = costs(module), hlo.collectives(module)
    except ValueError as error:  # a loop of unknown length
        return Plan(topology, work, report, parts, counted, None, [], _no_estimate(str(error)))
    estimated = estimate(found, moved, counted, work, topology, kernels)
    return Plan(topology, work, report, parts, counted, found, moved, estimated, hlo.loops_ended_by_data(module))


def estimate(
    found: Costs,
    moved: list[Collective],
    counted: Flops,
    work: Work,
    topology: Topology,
    kernels: Mapping[str, Cost],
) -> Estimate:
    """Time of a step: the cores' or the memory's, whichever is longer, and the collectives that nothing hides.

    Lookups, for which the compiler has no cycles, take their memory traffic; kernels the cycles that
    they declare.
    """
    chip = TPUS[topology.generation]
    needed = max(counted.total, work.model_flops) / work.chips
    inside = sum(times * kernels[name].cycles(topology.generation, call) for name, call, times in counted.calls)
    inside /= work.chips * chip.cores * chip.clock
    compute = found.cycles / chip.clock + found.lookups / chip.hbm_bandwidth + inside
    memory = found.traffic / chip.hbm_bandwidth
    every = sum(collective_seconds(collective, chip) for collective in moved)
    exposed = sum(collective_seconds(collective, chip) for collective in moved if not collective.overlapped)
    seconds = max(compute, memory, every - exposed) + exposed
    why_not = ""
    if work.chips > topology.chips:
        why_not = "how fast the network between slices is depends on the machines"
    elif found.unknown or counted.unknown:
        why_not = f"no cost is known for {', '.join((*found.unknown, *counted.unknown)[:3])}"
    elif found.kernels and not counted.kernels:
        why_not = "the program has kernels that its trace has not"
    elif needed > seconds * chip.peak_flops:
        why_not = f"{1000 * seconds:.3g} ms would be faster than the chip's peak"
    return Estimate(None if why_not else seconds, compute, inside, memory, every, exposed, why_not)


def _no_estimate(why: str) -> Estimate:
    return Estimate(None, 0.0, 0.0, 0.0, 0.0, 0.0, why)


class Largest(NamedTuple):
    """rows: the largest batch that was compiled and fits, 0 if none did.   full: whether the line says that more will
    not fit; otherwise the compiler's answers lay on no line."""

    rows: int
    full: bool


def largest_batch(total: Callable[[int], float], fixed: float, rows: int, multiple: int, capacity: float) -> Largest:
    """Two compilations, a straight line through what they need, and a check where it meets the capacity.

    total: rows -> bytes per chip that a batch of these rows needs; infinite where only that it does not fit is known.
    fixed: the part of it that a larger batch leaves alone.   rows: where to start.   multiple: of what batches are.
    """
    first = total(rows)
    half_full = rows // 4
    if math.isfinite(first):  # taking all temporaries for activations, so that the second batch fits
        half_full = int(rows * (capacity / 2 - fixed) / max(first - fixed, 1.0))
    second = max(half_full // multiple, 1) * multiple
    second = second if second != rows else 2 * rows
    points = [(rows, first), (second, total(second))]
    fitting = max((n for n, size in points if size <= capacity), default=0)
    for _ in range(2):  # the compiler saves memory when it gets tight, so the line may bend
        guess = _where_full(points[-2:], multiple, capacity)
        if guess <= fitting:
            break
        points.append((guess, total(guess)))
        if points[-1][1] <= capacity:
            return Largest(guess, True)
    return Largest(fitting, False)


def _where_full(points: list[tuple[int, float]], multiple: int, capacity: float) -> int:
    """The largest multiple at which the line through two points is within the capacity; 0 without such a line."""
    (n1, size1), (n2, size2) = points
    if n1 == n2 or not math.isfinite(size1 + size2) or (slope := (size2 - size1) / (n2 - n1)) <= 0:
        return 0
    return max(0, math.floor((n1 + (capacity - size1) / slope) / multiple) * multiple)
