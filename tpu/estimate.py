"""Time of a compiled step: of its instructions, one by one, and of the exchanges that they do not hide."""

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

# Cycles of a core for each row, beside its bytes. Of 1,024 float32, on v5e, XLA:TPU schedules 15 bundles for a row that
# is looked up, 128 transfers at a time, and some 110 instructions, 40 bundles, for one that is added to a table's, its
# indices sorted before. Doubled, since what waits for memory is not in them. The one measurement that is published,
# 10 GB/s of short rows (pytorch/xla#2403, v3), is of that order.
FETCHED, ADDED = 30, 80


class Estimate(NamedTuple):
    """seconds: of a step, the sum of what cannot overlap.   compute, memory, collectives: seconds of each alone.
    kernels: seconds of `compute` that are counted bundles, not the compiler's estimate.   exposed: seconds in which the
    cores wait for collectives.   why_not: '' or why seconds is None.
    """

    seconds: float | None
    compute: float
    kernels: float
    memory: float
    collectives: float
    exposed: float
    why_not: str = ""


def kernel_seconds(counted: Flops, work: Work, topology: Topology, kernels: Mapping[str, Cost]) -> dict[str, float]:
    """Kernel -> seconds of a step that a device is in it."""
    chip, found = topology.device, dict.fromkeys(counted.kernels, 0.0)
    rate = work.devices * chip.cores * chip.clock
    for name, call, times in counted.calls:
        found[name] += times * kernels[name].cycles(topology.generation, call) / rate
    return found


def clocks(module: Module, found: Costs, inside: Mapping[str, float], work: Work, topology: Topology) -> Clocks:
    """How long instructions and exchanges take."""
    chip, links = topology.device, network(topology, work.places)
    runs = {name: sum(n for run, n in found.kernels.items() if run.startswith(name)) for name in inside}

    def seconds(run: Run) -> float:
        one = spent(module, run)
        kernel = next((name for name in inside if one.kernel and run.instruction.name.startswith(name)), None)
        in_kernel = inside[kernel] / runs[kernel] if kernel else 0.0
        return one.cycles / chip.clock + lookup_seconds(one.lookups, chip) + in_kernel

    return Clocks(seconds, lambda collective: exchange(collective, links))


def lookup_seconds(lookups: Lookups, chip: Tpu) -> float:
    """Rows one after the other, and their bytes."""
    rows = lookups.fetched * FETCHED + lookups.added * ADDED
    return rows / chip.clock + lookups.bytes / chip.hbm_bandwidth


def estimate(
    found: Costs, line: Timeline, counted: Flops, inside: Mapping[str, float], work: Work, topology: Topology
) -> Estimate:
    """Time of a step: the cores' or the memory's, whichever is longer, and what the cores wait for collectives."""
    chip = topology.device
    needed = max(counted.total, work.model_flops) / work.devices
    memory = found.traffic / chip.hbm_bandwidth
    seconds = max(line.work, memory) + line.waits
    why_not = ""
    if found.unknown or counted.unknown:
        why_not = f"no cost is known for {', '.join((*found.unknown, *counted.unknown)[:3])}"
    elif found.kernels and not counted.kernels:
        why_not = "the program has kernels that its trace has not"
    elif needed > seconds * chip.peak_flops:
        why_not = f"{1000 * seconds:.3g} ms would be faster than the {topology.unit}'s peak"
    return Estimate(
        None if why_not else seconds, line.work, sum(inside.values()), memory, line.busy, line.waits, why_not
    )


def no_estimate(why: str) -> Estimate:
    return Estimate(None, 0.0, 0.0, 0.0, 0.0, 0.0, why)
