"""Time and memory traffic of a compiled TPU program, from the cycles that XLA estimated for each operation.

`compiled.cost_analysis()` counts a loop's body once, and adds about -1 s for each operation without an estimate; the
cycles in the program's text have neither fault. On v5p, where both are available, they agree to 5%.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

from tpu.collectives import KINDS
from tpu.hlo import Array, Instruction, Module, Run, arrays, called, inside, runs

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')
# Operations that cost nothing, or whose parts are counted separately; asynchronous work is counted where it starts.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
_FREE |= {"send", "recv"}  # done by the hosts
_LOOKUPS = ("gather", "scatter", "sort")
_SLICES = {"dynamic-slice": 0, "gather": 0, "dynamic-update-slice": 1}  # moved part: 0 the result, 1 operand 1


class Lookups(NamedTuple):
    """Work for which XLA estimates no cycles.   fetched, added: rows that are looked up, or added to a table's, one by
    one.   bytes: that lookups and sorting move to and from HBM."""

    fetched: float = 0.0
    added: float = 0.0
    bytes: float = 0.0


class Spent(NamedTuple):
    """The cost of one run of an instruction on one chip.

    cycles: of the cores, estimated by XLA.   traffic: bytes to and from HBM.   lookups: see `Lookups`.
    kernel: whether it is a custom kernel, whose cycles XLA does not know.   unknown: whether it must take time but has
    no estimate.
    """

    cycles: float = 0.0
    traffic: float = 0.0
    lookups: Lookups = Lookups()
    kernel: bool = False
    unknown: bool = False


class Costs(NamedTuple):
    """The costs of one run of the program on one chip.

    cycles: of the cores.   sources: cycles by place in the program.   traffic: bytes to and from HBM.
    lookups: of gathers, scatters and sorts.   kernels: name of an instruction -> runs of its custom kernel.
    unknown: operations that must take time but have no estimate; there should be none.
    """

    cycles: float
    sources: dict[str, float]
    traffic: float
    lookups: Lookups
    kernels: dict[str, int]
    unknown: tuple[str, ...]


def costs(module: Module) -> Costs:
    """Sum the costs of all operations of a program compiled for TPU."""
    cycles, traffic, lookups, kernels, unknown = Counter(), 0.0, Lookups(), Counter(), []
    for run in runs(module):
        cost, instruction = spent(module, run), run.instruction
        traffic += run.times * cost.traffic
        lookups = Lookups(*(total + run.times * n for total, n in zip(lookups, cost.lookups, strict=True)))
        if cost.cycles:
            source = _SOURCE.search(instruction.rest)
            cycles[short_source(source[1]) if source else instruction.opcode] += run.times * cost.cycles
        if cost.kernel:
            kernels[instruction.name] += run.times
        if cost.unknown:
            unknown.append(instruction.name)
    return Costs(sum(cycles.values()), dict(cycles.most_common()), traffic, lookups, dict(kernels), tuple(unknown))


def spent(module: Module, run: Run) -> Spent:
    """Return the cost of one run of an instruction, without a loop's body; nothing for instructions in a fusion."""
    instruction = run.instruction
    if run.fused or instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return Spent()
    if '"tpu_custom_call"' in instruction.rest:  # the compiler does not know the inside of a custom kernel
        return Spent(traffic=_traffic(module, run), kernel=True)
    if instruction.opcode == "custom-call":
        return Spent()  # annotations of the compiler, such as allocations
    traffic = _traffic(module, run)
    if instruction.opcode.removesuffix("-start") in KINDS:
        return Spent(traffic=traffic)  # takes time on the links, not on the cores
    if estimate := _CYCLES.search(instruction.rest):
        return Spent(float(estimate[1]), traffic)
    if any(word in instruction.name for word in _LOOKUPS):
        return Spent(0.0, traffic, _lookups(module, run, traffic))
    return Spent(traffic=traffic, unknown=_has_product(module, instruction))


def _lookups(module: Module, run: Run, traffic: float) -> Lookups:
    """Count the rows of a gather or scatter, in a fusion or not."""
    fetched = added = 0.0
    for inner in (run, *inside(module, run)):
        if inner.instruction.opcode == "gather":
            row = math.prod(_listed(inner.instruction, "slice_sizes"))
            fetched += math.prod(arrays(inner.instruction.shape)[0].dims) / row
        elif inner.instruction.opcode == "scatter":
            dims = arrays(inner.computation[inner.instruction.operands[2]].shape)[0].dims
            window = _listed(inner.instruction, "update_window_dims")
            added += math.prod(side for axis, side in enumerate(dims) if axis not in window)
    return Lookups(fetched, added, traffic)


def _listed(instruction: Instruction, attribute: str) -> list[int]:
    """Return the numbers of an attribute like slice_sizes={1,768}."""
    return [int(n) for n in re.search(rf"{attribute}=\{{([\d,]*)\}}", instruction.rest)[1].split(",") if n]


def _has_product(module: Module, instruction: Instruction) -> bool:
    """Return whether an operation is or contains a matrix product."""
    if instruction.opcode == "fusion":
        return any(_has_product(module, inner) for inner in called(module, instruction).values())
    return instruction.opcode in ("convolution", "dot")


def short_source(source: str) -> str:
    """Shorten 'jit(step)/transpose(jvp(Bert))/Bert.encode/while/body/.../query/dot_general' to 'backward
    BertLayer/.../query'.
    A loop's slices of its arrays, and operations outside of modules, keep the name of the operation."""
    parts = [part for part in source.split("/") if part not in ("while", "body", "closed_call", "checkpoint")]
    direction = "backward " if "transpose(" in source else "forward " if "jvp(" in source else ""
    modules = [part for part in parts[1:-1] if "(" not in part and "." not in part]  # 'Bert.encode' is a method
    if not modules or parts[-1] in ("slice", "dynamic_slice", "dynamic_update_slice"):
        modules.append(parts[-1])
    return direction + "/".join(modules)


def _traffic(module: Module, run: Run) -> float:
    """Return the bytes that one run of an instruction moves to and from HBM."""
    instruction, computation = run.instruction, run.computation
    results = arrays(instruction.shape)
    if instruction.opcode.endswith("-start"):  # from or to HBM, so once; its tuple has operands and results
        return results[len(instruction.operands) if instruction.opcode == "async-start" else 0].bytes
    if instruction.opcode == "fusion":
        return _fusion_traffic(module, run)
    if instruction.opcode in _SLICES:
        part = instruction if _SLICES[instruction.opcode] == 0 else computation[instruction.operands[1]]
        return 2 * _in_hbm(arrays(part.shape))
    operands = [array for name in instruction.operands for array in arrays(computation[name].shape)]
    return _in_hbm(results) + _in_hbm(operands)


def _fusion_traffic(module: Module, run: Run) -> float:
    """Return the bytes that a fusion moves: it reads only the slices that it takes of an operand, and writes only the
    updated part of a result."""
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
    """Return the bytes that a fusion's body reads of one of its values; infinite unless it only slices the value."""
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
    """Return the bytes that a fusion writes of one of its results."""
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
