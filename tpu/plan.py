"""Plan a train step on a TPU slice without having one: memory, collectives, time; the largest batch that fits."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tpu import hlo
from tpu.compiler import Report, compile_for_tpu
from tpu.costs import Costs, costs
from tpu.estimate import Estimate, clocks, estimate, kernel_seconds
from tpu.flops import Flops, flops
from tpu.kernel_costs import Cost
from tpu.overlap import Timed, timeline
from tpu.rules import shard_bytes
from tpu.topologies import Topology
from tpu.work import Work

# Share of a device's memory reserved for what a plan cannot count: fragmentation, other small programs, the runtime.
MARGIN = 0.03


class Plan(NamedTuple):
    """The plan of a step; sizes are bytes per device.

    parts: of the arguments.   costs, estimate: None if the program does not fit; collectives is then empty.
    data_loops: loops whose length depends on the data; one iteration of each is counted.   evaluation: memory during
    evaluation, None where that is less than in a step.
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
        """Bytes that a plan may use."""
        return (1 - MARGIN) * self.capacity

    @property
    def moments(self) -> dict[str, float]:
        """Bytes that a device holds at its peaks; each includes the batches that wait for their step."""
        ahead = self.work.ahead * self.parts.get("batch", 0)
        with_checkpoint = sum(self.parts.values()) + self.work.checkpoint
        held = {"in a step": self.report.total, "while a checkpoint is written": with_checkpoint}
        if self.evaluation is not None:
            held["in evaluation"] = self.evaluation
        return {name: size + ahead for name, size in held.items()}

    @property
    def needed(self) -> float:
        """The largest number of bytes that a device has to hold."""
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
        """Model FLOPs divided by the peak FLOPs of all devices in the estimated time."""
        seconds = self.estimate and self.estimate.seconds
        peak = self.topology.device.peak_flops * self.work.devices
        return self.work.model_flops / (seconds * peak) if seconds else None


def plan(work: Work, topology: Topology, kernels: Mapping[str, Cost], cache: Path) -> Plan:
    """Compile a step for a slice and return its plan."""
    traced = work.step.trace(*work.arguments)
    report = compile_for_tpu(traced.lower(), work.options, topology, cache)
    parts = {name: shard_bytes(tree) for name, tree in work.parts.items()}
    counted, evaluation = flops(traced.jaxpr, kernels), _evaluation(work, topology, cache)
    planned = Plan(topology, work, report, parts, counted, None, (), None, evaluation=evaluation)
    if not report.hlo:
        return planned
    module = hlo.parse(report.hlo)
    try:
        found = costs(module)
        inside = kernel_seconds(counted, work, topology, kernels)
        line = timeline(module, clocks(module, found, inside, work, topology))
    except ValueError as error:  # a loop of unknown length
        return planned._replace(estimate=Estimate(why_not=str(error)))
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
    """rows: the largest batch that was compiled and fits, 0 if none does.   full: whether extrapolation says that no
    larger batch fits; if not, memory did not grow linearly with the batch."""

    rows: int
    full: bool


def largest_batch(total: Callable[[int], float], fixed: float, rows: int, multiple: int, capacity: float) -> Largest:
    """Find the largest batch by two compilations, linear extrapolation of their memory, and a check of the result.

    total: rows -> bytes per device that a batch of these rows needs; infinite if it does not fit and the need is
    unknown.   fixed: the part of it that does not grow with the batch.   rows: where to start.   multiple: batch sizes
    are multiples of it.
    """
    first = total(rows)
    half_full = rows // 4
    if math.isfinite(first):  # assume that all temporaries are activations, so that the second batch fits
        half_full = int(rows * (capacity / 2 - fixed) / max(first - fixed, 1.0))
    second = max(half_full // multiple, 1) * multiple
    second = second if second != rows else 2 * rows
    points = [(rows, first), (second, total(second))]
    fitting = max((n for n, size in points if size <= capacity), default=0)
    for _ in range(2):  # the compiler saves memory when it is tight, so the growth may not be linear
        guess = _where_full(points[-2:], multiple, capacity)
        if guess <= fitting:
            break
        points.append((guess, total(guess)))
        if points[-1][1] <= capacity:
            return Largest(guess, True)
    return Largest(fitting, False)


def _where_full(points: list[tuple[int, float]], multiple: int, capacity: float) -> int:
    """Return the largest multiple at which the line through two points fits the capacity; 0 without such a line."""
    (n1, size1), (n2, size2) = points
    if n1 == n2 or not math.isfinite(size1 + size2) or (slope := (size2 - size1) / (n2 - n1)) <= 0:
        return 0
    return max(0, math.floor((n1 + (capacity - size1) / slope) / multiple) * multiple)
