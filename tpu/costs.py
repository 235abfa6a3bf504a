"""Time and memory traffic of a compiled TPU program, from the cycles that XLA estimated for each operation.

`compiled.cost_analysis()` counts a loop's body once, and its time is about -1 s for each operation without an estimate;
the cycles in the program's text have neither fault. On v5p, where both can be had, they agree to 5%.
"""

import re
from collections import Counter
from typing import NamedTuple

from tpu.chips import Tpu
from tpu.hlo import Array, Collective, Instruction, Module, Run, arrays, called, runs

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')
# What costs nothing, or whose parts are counted one by one; asynchronous work is counted where it starts.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
_FREE |= {"send", "recv"}  # by the hosts
_LOOKUPS = ("gather", "scatter", "sort")
_SLICES = {"dynamic-slice": 0, "gather": 0, "dynamic-update-slice": 1}  # what is read or written: result or operand 1


class Costs(NamedTuple):
    """Of one run of the program on one chip.

    cycles: of the cores.   sources: the same by where in the program they come from.   traffic: bytes to and from HBM.
    lookups: bytes of gathers, scatters and sorts, for which XLA estimates no cycles.   kernels: runs of custom kernels.
    unknown: operations that must take time and have no estimate; there should be none.
    """

    cycles: float
    sources: dict[str, float]
    traffic: float
    lookups: float
    kernels: int
    unknown: tuple[str, ...]


def costs(module: Module) -> Costs:
    """Sums over all operations of a program compiled for TPU."""
    cycles, traffic, lookups, kernels, unknown = Counter(), 0.0, 0.0, 0, []
    for run in runs(module):
        instruction = run.instruction
        if run.fused or instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            continue
        kernel = '"tpu_custom_call"' in instruction.rest
        if instruction.opcode == "custom-call" and not kernel:
            continue  # the compiler's own marks, like where it allocates
        moved = run.times * _traffic(module, run)
        traffic += moved
        estimate = _CYCLES.search(instruction.rest)
        source = _SOURCE.search(instruction.rest)
        if kernel:  # what the compiler knows of one is not its inside
            kernels += run.times
        elif estimate:
            cycles[short_source(source[1]) if source else instruction.opcode] += run.times * int(estimate[1])
        elif any(word in instruction.name for word in _LOOKUPS):
            lookups += moved
        elif _has_product(module, instruction):
            unknown.append(instruction.name)
    return Costs(sum(cycles.values()), dict(cycles.most_common()), traffic, lookups, kernels, tuple(unknown))


def _has_product(module: Module, instruction: Instruction) -> bool:
    """Whether an operation is or contains a matrix product."""
    if instruction.opcode == "fusion":
        return any(_has_product(module, inner) for inner in called(module, instruction).values())
    return instruction.opcode in ("convolution", "dot")


def short_source(source: str) -> str:
    """'jit(step)/transpose(jvp(Bert))/Bert.encode/while/body/.../query/dot_general' -> 'backward BertLayer/.../query'.

    The slices with which a loop keeps and fetches its arrays, and what belongs to no module, are named themselves.
    """
    parts = [part for part in source.split("/") if part not in ("while", "body", "closed_call", "checkpoint")]
    direction = "backward " if "transpose(" in source else "forward " if "jvp(" in source else ""
    modules = [part for part in parts[1:-1] if "(" not in part and "." not in part]  # 'Bert.encode' is a method
    if not modules or parts[-1] in ("slice", "dynamic_slice", "dynamic_update_slice"):
        modules.append(parts[-1])
    return direction + "/".join(modules)


def _traffic(module: Module, run: Run) -> float:
    """Bytes that one run of an instruction moves to and from HBM."""
    instruction, computation = run.instruction, run.computation
    results = arrays(instruction.shape)
    if instruction.opcode.endswith("-start"):  # from or to HBM, so once; the tuple has results beside operands
        return results[len(instruction.operands) if instruction.opcode == "async-start" else 0].bytes
    if instruction.opcode == "fusion":
        return _fusion_traffic(module, run)
    if instruction.opcode in _SLICES:
        part = instruction if _SLICES[instruction.opcode] == 0 else computation[instruction.operands[1]]
        return 2 * _in_hbm(arrays(part.shape))
    operands = [array for name in instruction.operands for array in arrays(computation[name].shape)]
    return _in_hbm(results) + _in_hbm(operands)


def _fusion_traffic(module: Module, run: Run) -> float:
    """A fusion reads of an operand only what it slices out, and writes of a result only what it updates."""
    total, body = 0.0, called(module, run.instruction)
    for index, name in enumerate(run.instruction.operands):
        whole = _in_hbm(arrays(run.computation[name].shape))
        total += min(whole, _read(module, body, _parameter(body, index))) if whole else 0.0
    root = next(i for i in body.values() if i.root)
    parts = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for part, result in zip(parts, arrays(run.instruction.shape), strict=False):
        if result.space == 0:
            total += _written(module, body, part)
    return total


def _parameter(body: dict[str, Instruction], index: int) -> Instruction:
    return next(i for i in body.values() if i.opcode == "parameter" and int(i.inside) == index)


def _read(module: Module, body: dict[str, Instruction], value: Instruction) -> float:
    """Bytes that a fusion's body needs of one of its values; infinite unless it only slices."""
    total = 0.0
    for use in (i for i in body.values() if value.name in i.operands):
        if use.opcode == "bitcast":
            total += _read(module, body, use)
        elif use.opcode == "fusion":
            inner = called(module, use)
            places = [index for index, name in enumerate(use.operands) if name == value.name]
            total += sum(_read(module, inner, _parameter(inner, index)) for index in places)
        elif use.opcode == "dynamic-update-slice":
            total += 0.0 if use.operands[0] == value.name else _bytes(value)
        elif use.opcode in _SLICES and use.operands[0] == value.name:
            total += _bytes(use)
        else:
            return float("inf")
    return total


def _written(module: Module, body: dict[str, Instruction], value: Instruction) -> float:
    """Bytes that a fusion writes of one of its results."""
    while value.opcode == "bitcast":
        value = body[value.operands[0]]
    if value.opcode == "fusion":
        inner = called(module, value)
        root = next(i for i in inner.values() if i.root)
        return _bytes(value) if root.opcode == "tuple" else _written(module, inner, root)
    return _bytes(body[value.operands[1]] if value.opcode == "dynamic-update-slice" else value)


def _bytes(value: Instruction) -> float:
    return sum(array.bytes for array in arrays(value.shape))


def _in_hbm(found: tuple[Array, ...] | list[Array]) -> float:
    return sum(array.bytes for array in found if array.space == 0)


def collective_seconds(collective: Collective, chip: Tpu) -> float:
    """Time on a ring along one axis of the torus, both ways; an all-reduce passes it twice.

    Optimistic where the slice has no wrap-around links, pessimistic where a group spans several axes.
    """
    bandwidth = chip.ici_bandwidth / chip.axes
    if collective.kind == "collective-permute":
        return collective.bytes / (bandwidth / 2)  # to one neighbour
    passes = 2 if collective.kind == "all-reduce" else 1
    return passes * collective.bytes * (collective.group - 1) / collective.group / bandwidth
