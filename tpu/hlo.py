"""Read from the text of an optimised XLA program what it does in one run on one device.

XLA's own cost analysis counts the body of a loop once; here it is multiplied by the loop's trip count.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = {
    "while": ("condition", "body"),
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls",),
    "conditional": ("true_computation", "false_computation", "branch_computations"),
}


class Instruction(NamedTuple):
    """shape: as printed.   inside: the text between the opcode's parentheses.   rest: the text after them."""

    name: str
    shape: str
    opcode: str
    inside: str
    rest: str
    root: bool

    @property
    def operands(self) -> list[str]:
        return _OPERAND.findall(self.inside)


class Module(NamedTuple):
    """computations: name -> instructions by name, in order.   devices: how many devices run the program together."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    devices: int


class Array(NamedTuple):
    """space: memory space of the device, 0 for HBM."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> float:
        if self.dtype in ("token", "opaque"):
            return 0.0
        size = (8 if self.dtype == "pred" else int(re.search(r"\d+", self.dtype)[0])) / 8
        for side in self.dims:
            size *= side
        return size


def parse(text: str) -> Module:
    """Parse the text of an HLO module, from `compiled.as_text()` or XLA's dumps; ValueError for other text."""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None and (named := _NAME.match(line)):
            instruction = _instruction(named[2], line[named.end() :], bool(named[1]))
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation")
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])]
    devices = 1
    for count in counts:
        devices *= count
    return Module(computations, entry, devices)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    """Parse `shape opcode(operands)rest`."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, after = text[end:].strip().partition("(")
    close = _closing("(" + after, 0)
    return Instruction(name, text[:end], opcode, after[: close - 1], after[close:], root)


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


def arrays(shape: str) -> tuple[Array, ...]:
    """Return the arrays of a printed shape, with tuples flattened."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        found.append(Array(dtype, tuple(int(d) for d in dims.split(",") if d), int(space[1]) if space else 0))
    return tuple(found)


class Run(NamedTuple):
    """An instruction in its computation; it runs `times` times in one run of the program.
    fused: how many fusions (or asynchronous operations) are around it."""

    instruction: Instruction
    computation: dict[str, Instruction]
    times: int
    fused: int


def runs(module: Module) -> Iterator[Run]:
    """Yield every instruction that runs, with the trip counts of loops and every branch of conditionals.
    A loop whose length depends on the data counts once.   ValueError for other loops without a readable trip count."""
    yield from _runs(module, module.entry, 1, 0)


def inside(module: Module, run: Run) -> Iterator[Run]:
    """Yield what runs inside a fusion or an asynchronous operation."""
    for name in computations(run.instruction):
        yield from _runs(module, name, run.times, run.fused + 1)


def _runs(module: Module, name: str, times: int, fused: int) -> Iterator[Run]:
    computation = module.computations[name]
    for instruction in computation.values():
        run = Run(instruction, computation, times, fused)
        yield run
        if instruction.opcode in ("fusion", "async-start"):
            yield from inside(module, run)
        elif instruction.opcode in _CALLED:
            inner = times * (trips(module, computation, instruction) or 1) if instruction.opcode == "while" else times
            for called in computations(instruction):
                yield from _runs(module, called, inner, fused)


def called(module: Module, instruction: Instruction) -> dict[str, Instruction]:
    """Return the computation of a fusion."""
    return module.computations[computations(instruction)[0]]


def computations(instruction: Instruction) -> list[str]:
    """Return the names of the computations that an instruction runs."""
    names = []
    for attribute in _CALLED.get(instruction.opcode, ()):
        if found := re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", instruction.rest):
            names += [name.strip(" {}").lstrip("%") for name in found[1].split(",")]
    return names


def loops_ended_by_data(module: Module) -> int:
    """Return how many loops have a length that depends on the data."""
    loops = (run for run in runs(module) if run.instruction.opcode == "while")
    return sum(trips(module, run.computation, run.instruction) is None for run in loops)


def trips(module: Module, computation: dict[str, Instruction], loop: Instruction) -> int | None:
    """Return how often a while loop runs: as XLA noted it, or from its counter's first value, step and bound.
    None if the program computes the bound from data."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(noted[1])
    condition, body = (module.computations[name] for name in computations(loop))
    bound = [value for i in condition.values() if (value := _constant(i)) is not None]
    root = next(i for i in condition.values() if i.root)
    counters = [condition[o] for o in root.operands if condition[o].opcode == "get-tuple-element"]
    index = [int(re.search(r"index=(\d+)", counter.rest)[1]) for counter in counters]
    if not bound and len(index) == 2:  # the loop carries counter and bound
        bound = [_first(computation, loop, index[1])]
    if len(bound) != 1 or not index or "direction=" in root.rest and "direction=LT" not in root.rest:
        raise ValueError(f"cannot tell how often the loop {loop.name} runs")
    if bound[0] is None:
        return None
    first = _first(computation, loop, index[0]) or 0  # as `lax.scan` has it
    return -(-(bound[0] - first) // _step(body, index[0]))


def _first(computation: dict[str, Instruction], loop: Instruction, index: int) -> int | None:
    """Return the first value of a loop's carry at an index, None if it is not a constant in the text."""
    state = computation[loop.operands[0]]
    value = computation.get(state.operands[index]) if state.opcode == "tuple" else None
    while value is not None and value.opcode in ("copy", "copy-done", "copy-start", "bitcast"):
        value = computation.get(value.operands[0])
    return _constant(value) if value is not None else None


def _step(body: dict[str, Instruction], index: int) -> int:
    """Return what a loop's body adds to its counter; 1, as in `lax.scan`, if it is not a constant in the text."""
    root = next(i for i in body.values() if i.root)
    value = body.get(root.operands[index]) if root.opcode == "tuple" else None
    if value is None or value.opcode != "add":
        return 1
    added = [c for o in value.operands if o in body and (c := _constant(body[o])) is not None]
    return added[0] if added else 1


def _constant(instruction: Instruction) -> int | None:
    """Return the value of a scalar integer constant."""
    is_integer = instruction.opcode == "constant" and re.match(r"[su]\d+\[\]", instruction.shape)
    return int(instruction.inside) if is_integer else None
