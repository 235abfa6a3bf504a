"""Estimate the time of a compiled step: the sum over its instructions, and the collectives that they do not hide."""

from collections.abc import Mapping
from typing import NamedTuple

from tpu.costs import Costs, Lookups, spent
from tpu.flops import Flops
from tpu.generations import Tpu
from tpu.hlo import Module, Run
from tpu.kernel_costs import Cost
from tpu.network import exchange, network
from tpu.overlap import Clocks, Timeline
from tpu.topologies import Topology
from tpu.work import Work

# Cycles of a core for each row, in addition to its bytes. For rows of 1,024 float32 on v5e, XLA:TPU schedules 15
# bundles to look up a row, 128 transfers at a time, and some 110 instructions in 40 bundles to add one to a table's
# row, with sorted indices. The numbers are doubled, because bundles do not include waiting for memory. The only
# published measurement, 10 GB/s for short rows (pytorch/xla#2403, v3), is of the same order.
FETCHED, ADDED = 30, 80


class Estimate(NamedTuple):
    """seconds: of a step, counting only what cannot overlap; None without an estimate.   compute, memory, collectives:
    seconds of each on its own.   kernels: the part of `compute` from counted bundles instead of the compiler's
    estimate.   exposed: seconds in which the cores wait for collectives.   why_not: why seconds is None, or ''.
    """

    seconds: float | None = None
    compute: float = 0.0
    kernels: float = 0.0
    memory: float = 0.0
    collectives: float = 0.0
    exposed: float = 0.0
    why_not: str = ""


def kernel_seconds(counted: Flops, work: Work, topology: Topology, kernels: Mapping[str, Cost]) -> dict[str, float]:
    """Return for each kernel the seconds of a step that a device spends in it."""
    chip, seconds = topology.device, dict.fromkeys(counted.kernels, 0.0)
    rate = work.devices * chip.cores * chip.clock
    for name, call, times in counted.calls:
        seconds[name] += times * kernels[name].cycles(topology.generation, call) / rate
    return seconds


def clocks(module: Module, found: Costs, inside: Mapping[str, float], work: Work, topology: Topology) -> Clocks:
    """Return functions for the time of instructions and of collectives."""
    chip, links = topology.device, network(topology, work.places)
    runs = {name: sum(n for run, n in found.kernels.items() if run.startswith(name)) for name in inside}

    def seconds(run: Run) -> float:
        cost = spent(module, run)
        kernel = next((name for name in inside if cost.kernel and run.instruction.name.startswith(name)), None)
        in_kernel = inside[kernel] / runs[kernel] if kernel else 0.0
        return cost.cycles / chip.clock + lookup_seconds(cost.lookups, chip) + in_kernel

    return Clocks(seconds, lambda collective: exchange(collective, links))


def lookup_seconds(lookups: Lookups, chip: Tpu) -> float:
    """Return the seconds of lookups: rows one after the other, plus their bytes."""
    rows = lookups.fetched * FETCHED + lookups.added * ADDED
    return rows / chip.clock + lookups.bytes / chip.hbm_bandwidth


def estimate(
    found: Costs, line: Timeline, counted: Flops, inside: Mapping[str, float], work: Work, topology: Topology
) -> Estimate:
    """Estimate the time of a step: the longer of the cores' and the memory's, plus the cores' wait for collectives."""
    chip = topology.device
    needed = max(counted.total, work.model_flops) / work.devices
    memory = found.traffic / chip.hbm_bandwidth
    seconds = max(line.work, memory) + line.waits
    why_not = ""
    if found.unknown or counted.unknown:
        why_not = f"no cost is known for {', '.join((*found.unknown, *counted.unknown)[:3])}"
    elif found.kernels and not counted.kernels:
        why_not = "the program has kernels that its trace does not have"
    elif needed > seconds * chip.peak_flops:
        why_not = f"{1000 * seconds:.3g} ms would be faster than the {topology.unit}'s peak"
    seconds = None if why_not else seconds
    return Estimate(seconds, line.work, sum(inside.values()), memory, line.busy, line.waits, why_not)
