"""How much of a program's collectives overlaps with work, read from its schedule between each one's start and end."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tpu.collectives import Collective, of_instruction
from tpu.hlo import Instruction, Module, Run, computations, trips
from tpu.network import Exchange


class Timed(NamedTuple):
    """A collective with the seconds of all of its runs.   seconds: on its links.   exposed: the part in which the cores
    wait for it."""

    collective: Collective
    seconds: float
    exposed: float


class Timeline(NamedTuple):
    """The time of one run of a computation.   work: seconds of the cores.   waits: seconds in which they wait for
    collectives.   busy: seconds of all collectives."""

    work: float
    waits: float
    busy: float
    collectives: tuple[Timed, ...]


class Clocks(NamedTuple):
    """work: run -> its seconds on the cores.   exchange: collective -> the time of one run on its links."""

    work: Callable[[Run], float]
    exchange: Callable[[Collective], Exchange]


def timeline(module: Module, clocks: Clocks, name: str = "") -> Timeline:
    """Simulate a computation, by default the program's, in the order of its schedule.
    Collectives on the same links run one after the other. A loop whose length depends on the data counts as one
    iteration, a conditional as all of its branches."""
    computation = module.computations[name or module.entry]
    links, last = _Links(), _last_of_channels(module, computation)
    for instruction in computation.values():
        run = Run(instruction, computation, 1, 0)
        if instruction.opcode in ("while", "call", "conditional"):
            turns = (trips(module, computation, instruction) or 1) if instruction.opcode == "while" else 1
            for inner in computations(instruction):
                links.run(timeline(module, clocks, inner), turns)
            continue
        found = of_instruction(module, run)
        for collective in found:
            key = _key(instruction, collective)
            if key not in links.pending:
                links.pending[key] = _Pending(collective, clocks.exchange(collective), key == collective.channel)
        links.work(clocks.work(run), {collective.channel for collective in found})
        for key in _ended(instruction, found, last):
            links.wait(key)
    for key in tuple(links.pending):
        links.wait(key)
    return links.timeline()


def _key(instruction: Instruction, collective: Collective) -> str:
    """Return the key that a collective's end names: the channel if fusions carry it, else the starting instruction."""
    return collective.channel if collective.channel and instruction.opcode == "fusion" else instruction.name


def _last_of_channels(module: Module, computation: Mapping[str, Instruction]) -> dict[str, str]:
    """Return channel of a collective -> the last instruction that carries it."""
    fusions = [Run(i, computation, 1, 0) for i in computation.values() if i.opcode == "fusion"]
    return {c.channel: run.instruction.name for run in fusions for c in of_instruction(module, run) if c.channel}


def _ended(instruction: Instruction, found: list[Collective], last: Mapping[str, str]) -> list[str]:
    """Return the keys of the collectives that must be complete when an instruction ends."""
    if instruction.opcode.endswith("-done"):
        return instruction.operands[:1]
    if instruction.opcode.endswith("-start") or instruction.opcode == "send":
        return []
    return [_key(instruction, c) for c in found if last.get(c.channel, instruction.name) == instruction.name]


class _Pending:
    """A collective that has started.   carried: whether it proceeds only while a fusion that carries it runs."""

    def __init__(self, collective: Collective, exchange: Exchange, carried: bool) -> None:
        self.collective, self.exchange, self.carried = collective, exchange, carried
        self.left, self.delay, self.waited = exchange.seconds, exchange.delay, 0.0


class _Links:
    """The links of one chip, with the pending collectives in the order in which they started."""

    def __init__(self) -> None:
        self.pending: dict[str, _Pending] = {}
        self.over: list[Timed] = []
        self.worked = 0.0

    def work(self, seconds: float, channels: set[str]) -> None:
        """Advance time while the cores work and pending collectives proceed."""
        self.worked += seconds
        self._advance(seconds, channels)

    def _advance(self, seconds: float, channels: set[str]) -> None:
        while seconds > 0 and (moving := self._moving(channels)):
            seconds -= self._pass(min(seconds, *(pending.left for pending in moving)), moving)
        self._pass(seconds, [])

    def _pass(self, seconds: float, moving: list[_Pending]) -> float:
        """Advance time by `seconds`, in which the moving collectives proceed."""
        for pending in moving:
            pending.left -= seconds
        for pending in self.pending.values():
            pending.delay -= seconds
        return seconds

    def _moving(self, channels: set[str]) -> list[_Pending]:
        """Return the collectives that have their links; of two on the same links, the one that started first."""
        moving, taken = [], set()
        for pending in self.pending.values():
            if pending.left <= 0 or pending.carried and pending.collective.channel not in channels:
                continue
            if not taken & pending.exchange.axes:
                moving.append(pending)
            taken |= pending.exchange.axes
        return moving

    def wait(self, key: str) -> None:
        """Wait for a collective, and so for earlier ones that occupy its links."""
        if (awaited := self.pending.get(key)) is None:
            return  # the -done of another operation
        channels = {awaited.collective.channel}
        while awaited.left > 0:
            moving = self._moving(channels)
            awaited.waited += self._pass(min(pending.left for pending in moving), moving)
        if (rest := awaited.delay) > 0:
            awaited.waited += rest
            self._advance(rest, set())
        del self.pending[key]
        taken = max(awaited.exchange.seconds, awaited.exchange.delay)
        self.over.append(Timed(awaited.collective, taken, awaited.waited))

    def run(self, inner: Timeline, turns: int) -> None:
        """Run a loop; collectives that started before it proceed while the loop does not use the links."""
        total = turns * (inner.work + inner.waits)
        self._advance(max(total - turns * inner.busy, 0.0), set())
        self.worked += turns * inner.work
        for collective, seconds, exposed in inner.collectives:
            repeated = collective._replace(times=collective.times * turns)
            self.over.append(Timed(repeated, turns * seconds, turns * exposed))

    def timeline(self) -> Timeline:
        waits, busy = sum(timed.exposed for timed in self.over), sum(timed.seconds for timed in self.over)
        return Timeline(self.worked, waits, busy, tuple(self.over))
