"""A train step on a slice of TPUs, before there is one: memory, collectives, time; the largest batch that fits."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tpu import hlo
from tpu.compiler import Report, compile_for_tpu
from tpu.costs import Costs, costs
from tpu.estimate import Estimate, clocks, estimate, kernel_seconds, no_estimate
from tpu.flops import Flops, flops
from tpu.kernel_costs import Cost
from tpu.overlap import Timed, timeline
from tpu.rules import shard_bytes
from tpu.topologies import Topology
from tpu.work import Work

# Of a device's memory, for what no plan counts: fragments between arrays, other small programs, the runtime.
MARGIN = 0.03


class Plan(NamedTuple):
    """Per device, sizes in bytes.   parts: of the arguments.   costs, collectives, estimate: None if it does not fit.

    data_loops: loops that the data end, of which one turn is counted.   evaluation: what a device holds in evaluation,
    None where that is less than in a step.
    """

    topology: Topology
    work: Work
    report: Report
    parts: dict[str, int]
    flops: Flops
    costs: Costs | None
    collectives: tuple[Timed, ...]
    estimate: Estimate | None
    data_loops: int = 0
    evaluation: float | None = None

    @property
    def capacity(self) -> float:
        return self.topology.device.hbm

    @property
    def room(self) -> float:
        """What a plan may fill."""
        return (1 - MARGIN) * self.capacity

    @property
    def moments(self) -> dict[str, float]:
        """What a device holds when it holds much; batches that wait for their step are in all of it."""
        ahead = self.work.ahead * self.parts.get("batch", 0)
        held = {"in a step": self.report.total, "while a checkpoint is written": self.during_checkpoint}
        if self.evaluation is not None:
            held["in evaluation"] = self.evaluation
        return {name: size + ahead for name, size in held.items()}

    @property
    def during_checkpoint(self) -> int:
        return sum(self.parts.values()) + self.work.checkpoint

    @property
    def needed(self) -> float:
        """The most that a device has to hold."""
        return max(self.moments.values())

    @property
    def fits(self) -> bool:
        return self.report.needed is None and self.needed <= self.room

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self.estimate and self.estimate.seconds
        return self.work.rows * self.work.length / seconds if seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what all devices could do in the estimated time."""
        seconds = self.estimate and self.estimate.seconds
        peak = self.topology.device.peak_flops * self.work.devices
        return self.work.model_flops / (seconds * peak) if seconds else None


def plan(work: Work, topology: Topology, kernels: Mapping[str, Cost], cache: Path) -> Plan:
    """Compile a step for a slice and read what it will do."""
    traced = work.step.trace(*work.arguments)
    report = compile_for_tpu(traced.lower(), work.options, topology, cache)
    parts = {name: shard_bytes(tree) for name, tree in work.parts.items()}
    counted = flops(traced.jaxpr, kernels)
    planned = Plan(
        topology, work, report, parts, counted, None, (), None, evaluation=_evaluation(work, topology, cache)
    )
    if not report.hlo:
        return planned
    module = hlo.parse(report.hlo)
    try:
        found = costs(module)
        inside = kernel_seconds(counted, work, topology, kernels)
        line = timeline(module, clocks(module, found, inside, work, topology))
    except ValueError as error:  # a loop of unknown length
        return planned._replace(estimate=no_estimate(str(error)))
    return planned._replace(
        costs=found,
        collectives=line.collectives,
        estimate=estimate(found, line, counted, inside, work, topology),
        data_loops=hlo.loops_ended_by_data(module),
    )


def _evaluation(work: Work, topology: Topology, cache: Path) -> float | None:
    if work.evaluation is None:
        return None
    program, beside = work.evaluation
    lowered = program.run.trace(*program.arguments).lower()
    return compile_for_tpu(lowered, program.options, topology, cache).total + beside


class Largest(NamedTuple):
    """rows: the largest batch that was compiled and fits, 0 if none did.   full: whether the line says that more will
    not fit; otherwise the compiler's answers lay on no line."""

    rows: int
    full: bool


def largest_batch(total: Callable[[int], float], fixed: float, rows: int, multiple: int, capacity: float) -> Largest:
    """Two compilations, a straight line through what they need, and a check where it meets the capacity.

    total: rows -> bytes per device that a batch of these rows needs; infinite where only that it does not fit is known.
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
