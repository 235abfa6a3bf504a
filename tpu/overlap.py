"""What of a program's exchanges its work hides: read from the schedule, between the start of each and its end."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tpu.collectives import Collective, of_instruction
from tpu.hlo import Instruction, Module, Run, computations, trips
from tpu.network import Exchange


class Timed(NamedTuple):
    """A collective, with the seconds of all of its runs: on its links, and of them those while the cores wait."""

    collective: Collective
    seconds: float
    exposed: float


class Timeline(NamedTuple):
    """Of one run of a computation.   work: seconds of the cores.   waits: seconds in which they wait for exchanges.
    busy: seconds of all exchanges."""

    work: float
    waits: float
    busy: float
    collectives: tuple[Timed, ...]


class Clocks(NamedTuple):
    """work: seconds of one run of an instruction on the cores.   exchange: one run of a collective on its links."""

    work: Callable[[Run], float]
    exchange: Callable[[Collective], Exchange]


def timeline(module: Module, clocks: Clocks, name: str = "") -> Timeline:
    """A computation, by default the program's, in the order of its schedule.

    Exchanges that want the same links take turns. Of a loop that the data end one turn counts, of a conditional every
    branch.
    """
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
                carried = key == collective.channel
                links.start(key, collective, clocks.exchange(collective), carried)
        links.work(clocks.work(run), {collective.channel for collective in found})
        for key in _ended(instruction, found, last):
            links.wait(key)
    for key in tuple(links.pending):
        links.wait(key)
    return links.timeline()


def _key(instruction: Instruction, collective: Collective) -> str:
    """What its end names: the channel where several fusions carry one, else the instruction that starts it."""
    return collective.channel if collective.channel and instruction.opcode == "fusion" else instruction.name


def _last_of_channels(module: Module, computation: Mapping[str, Instruction]) -> dict[str, str]:
    """The last instruction of those that carry a collective, by its channel."""
    fusions = [Run(i, computation, 1, 0) for i in computation.values() if i.opcode == "fusion"]
    return {c.channel: run.instruction.name for run in fusions for c in of_instruction(module, run) if c.channel}


def _ended(instruction: Instruction, found: list[Collective], last: Mapping[str, str]) -> list[str]:
    """What has to have arrived when an instruction is over."""
    if instruction.opcode.endswith("-done"):
        return instruction.operands[:1]
    if instruction.opcode.endswith("-start") or instruction.opcode == "send":
        return []
    return [_key(instruction, c) for c in found if last.get(c.channel, instruction.name) == instruction.name]


class _Pending:
    """A collective on its way.   carried: it gets on only while a fusion that has it runs."""

    def __init__(self, collective: Collective, exchange: Exchange, carried: bool) -> None:
        self.collective, self.exchange, self.carried = collective, exchange, carried
        self.left, self.delay, self.waited = exchange.seconds, exchange.delay, 0.0


class _Links:
    """The links of one chip, in the order in which exchanges want them."""

    def __init__(self) -> None:
        self.pending: dict[str, _Pending] = {}
        self.over: list[Timed] = []
        self.worked = 0.0

    def start(self, key: str, collective: Collective, exchange: Exchange, carried: bool) -> None:
        self.pending[key] = _Pending(collective, exchange, carried)

    def work(self, seconds: float, channels: set[str]) -> None:
        """The cores work and the exchanges get on."""
        self.worked += seconds
        self._advance(seconds, channels)

    def _advance(self, seconds: float, channels: set[str]) -> None:
        while seconds > 0 and (moving := self._moving(channels)):
            seconds -= self._pass(min(seconds, *(pending.left for pending in moving)), moving)
        self._pass(seconds, [])

    def _pass(self, seconds: float, moving: list[_Pending]) -> float:
        """So much time goes by."""
        for pending in moving:
            pending.left -= seconds
        for pending in self.pending.values():
            pending.delay -= seconds
        return seconds

    def _moving(self, channels: set[str]) -> list[_Pending]:
        """Those that have their links: of two that want the same, the one that came first."""
        moving, taken = [], set()
        for pending in self.pending.values():
            if pending.left <= 0 or pending.carried and pending.collective.channel not in channels:
                continue
            if not taken & pending.exchange.axes:
                moving.append(pending)
            taken |= pending.exchange.axes
        return moving

    def wait(self, key: str) -> None:
        """The cores wait for one, and so for those before it that have its links."""
        if (awaited := self.pending.get(key)) is None:
            return  # a -done of something else
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
        """A loop: what is on its way from before it gets on while the loop leaves the links alone."""
        total = turns * (inner.work + inner.waits)
        self._advance(max(total - turns * inner.busy, 0.0), set())
        self.worked += turns * inner.work
        for collective, seconds, exposed in inner.collectives:
            several = collective._replace(times=collective.times * turns)
            self.over.append(Timed(several, turns * seconds, turns * exposed))

    def timeline(self) -> Timeline:
        waits, busy = sum(one.exposed for one in self.over), sum(one.seconds for one in self.over)
        return Timeline(self.worked, waits, busy, tuple(self.over))
