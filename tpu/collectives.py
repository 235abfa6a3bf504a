"""The collectives (exchanges between devices) of a compiled program."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from tpu.groups import Groups, groups
from tpu.hlo import Array, Instruction, Module, Run, arrays, inside

# A 'send' goes to another slice, through the hosts.
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "send")


class Collective(NamedTuple):
    """One collective instruction on one device.

    kind: of KINDS.   arrays: its results; for a reduce-scatter its operands, because only its results are smaller.
    groups: devices that exchange with each other; for a permutation, pairs.   times: how often it runs.
    source: op_name.   channel: of a collective that XLA copied into the fusions that it overlaps with, else ''.
    """

    kind: str
    arrays: tuple[Array, ...]
    groups: Groups
    times: int
    source: str
    channel: str = ""

    @property
    def bytes(self) -> float:
        """Bytes of the whole arrays in all runs."""
        return self.times * sum(array.bytes for array in self.arrays)

    @property
    def group(self) -> int:
        """The number of devices that exchange with each other."""
        return 2 if self.kind in ("send", "collective-permute") else len(self.groups[0])


def of_instruction(module: Module, run: Run) -> list[Collective]:
    """Return the collectives of an instruction, including those inside a fusion or an asynchronous operation."""
    return of_runs([run, *inside(module, run)], module.devices)


def of_runs(found: Iterable[Run], devices: int) -> list[Collective]:
    """Return the collectives of these runs, with all copies: XLA:TPU copies an overlapped collective, under one
    channel, into each fusion that it overlaps with.
    XLA:TPU's reduce-scatter is a fusion of an all-reduce with the slice of it that a device keeps."""
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
    """Return whether a computation returns a slice of each of this instruction's results."""
    value = lambda name: run.computation[name]
    root = next(i for i in run.computation.values() if i.root)
    kept = list(map(value, root.operands)) if root.opcode == "tuple" else [root]
    sources = [value(i.operands[0]) for i in kept if i.opcode == "dynamic-slice"]
    whole = [value(i.operands[0]) if i.opcode == "get-tuple-element" else i for i in sources]
    return len(whole) == len(kept) and all(i.name == run.instruction.name for i in whole)


def _moved(instruction: Instruction, group: int) -> tuple[Array, ...]:
    """Return the arrays of a collective: results, or for a reduce-scatter operands."""
    whole = arrays(instruction.shape)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        whole = whole[len(instruction.operands) : 2 * len(instruction.operands)]  # results follow the operands
    if instruction.opcode == "send":
        whole = whole[:1]  # the rest is its context
    if instruction.opcode == "reduce-scatter":
        axis = int(re.search(r"dimensions=\{(\d+)\}", instruction.rest)[1])
        longer = lambda dims: (*dims[:axis], dims[axis] * group, *dims[axis + 1 :])
        whole = tuple(array._replace(dims=longer(array.dims)) for array in whole)
    return whole
