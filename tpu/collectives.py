"""The exchanges between devices in a compiled program."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from tpu.groups import Groups, groups
from tpu.hlo import Array, Instruction, Module, Run, arrays, inside, runs

# A 'send' goes to another slice, through the hosts.
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "send")


class Collective(NamedTuple):
    """One collective instruction on one device.

    kind: of KINDS.   arrays: what it results in; for a reduce-scatter what it takes, for the others are never smaller.
    groups: devices that exchange with each other; for a permutation, pairs.   times: how often it runs.
    source: op_name.   channel: of one that is copied into the fusions that it runs beside, else ''.
    """

    kind: str
    arrays: tuple[Array, ...]
    groups: Groups
    times: int
    source: str
    channel: str = ""

    @property
    def bytes(self) -> float:
        """Bytes of the whole arrays, of all runs."""
        return self.times * sum(array.bytes for array in self.arrays)

    @property
    def group(self) -> int:
        """How many devices exchange with each other."""
        return 2 if self.kind in ("send", "collective-permute") else len(self.groups[0])


def collectives(module: Module) -> list[Collective]:
    """Every exchange between devices, a -start and its -done counted once."""
    found = of_runs(runs(module), module.devices)
    copies = {collective.channel: collective for collective in found if collective.channel}
    return [c for c in found if not c.channel or copies.pop(c.channel, None)]


def of_instruction(module: Module, run: Run) -> list[Collective]:
    """The exchanges of an instruction, in the fusion or asynchronous operation that it may be, too."""
    return of_runs([run, *inside(module, run)], module.devices)


def of_runs(found: Iterable[Run], devices: int) -> list[Collective]:
    """XLA:TPU copies an overlapped collective into each fusion that it runs beside, under one channel: all are here.

    Its reduce-scatter is a fusion of an all-reduce with the slice of it that a device keeps.
    """
    return [collective for run in found if (collective := _collective(run, devices)) is not None]


def _collective(run: Run, devices: int) -> Collective | None:
    instruction = run.instruction
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    exchanged = groups(instruction.rest, devices)
    if kind not in ("send", "collective-permute") and len(exchanged[0]) == 1:
        return None
    scattered = kind == "all-reduce" and bool(run.fused) and _keeps_slices(run)
    beside = run.fused > scattered  # inside a fusion that does other work
    channel = re.search(r"channel_id=(\d+)", instruction.rest) if beside else None
    source = re.search(r'op_name="([^"]*)"', instruction.rest)
    return Collective(
        "reduce-scatter" if scattered else kind,
        _moved(instruction, len(exchanged[0])),
        exchanged,
        run.times,
        source[1] if source else "",
        channel[1] if channel else "",
    )


def _keeps_slices(run: Run) -> bool:
    """Whether a computation results in a slice of each of this instruction's results."""
    value = lambda name: run.computation[name]
    root = next(i for i in run.computation.values() if i.root)
    kept = list(map(value, root.operands)) if root.opcode == "tuple" else [root]
    sources = [value(i.operands[0]) for i in kept if i.opcode == "dynamic-slice"]
    whole = [value(i.operands[0]) if i.opcode == "get-tuple-element" else i for i in sources]
    return len(whole) == len(kept) and all(i.name == run.instruction.name for i in whole)


def _moved(instruction: Instruction, group: int) -> tuple[Array, ...]:
    """The arrays of a collective: results, or for a reduce-scatter operands."""
    whole = arrays(instruction.shape)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        whole = whole[len(instruction.operands) : 2 * len(instruction.operands)]  # after the operands themselves
    if instruction.opcode == "send":
        whole = whole[:1]  # the others are its context
    if instruction.opcode == "reduce-scatter":
        axis = int(re.search(r"dimensions=\{(\d+)\}", instruction.rest)[1])
        longer = lambda dims: (*dims[:axis], dims[axis] * group, *dims[axis + 1 :])
        whole = tuple(array._replace(dims=longer(array.dims)) for array in whole)
    return whole
