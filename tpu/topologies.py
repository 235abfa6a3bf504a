"""Slices that XLA:TPU compiles for, named by shape in chips (`v5e:4x4`) or as in Google Cloud (`v5litepod-16`)."""

import difflib
import math
from typing import NamedTuple

from data_pipelines.errors import UserError
from tpu.generations import GENERATIONS, Tpu


class Topology(NamedTuple):
    """A slice.   generation: a key of GENERATIONS.   shape: in chips, like '4x4'."""

    generation: str
    shape: str

    def __str__(self) -> str:
        return f"{GENERATIONS[self.generation].xla}:{self.shape}"

    @property
    def device(self) -> Tpu:
        """The facts about its devices; a chip is one or two devices."""
        return GENERATIONS[self.generation].device

    @property
    def unit(self) -> str:
        """The word for a device."""
        return "chip" if self.device.per_chip == 1 else "device"

    @property
    def chips(self) -> int:
        return math.prod(self.sides)

    @property
    def cloud(self) -> str:
        """Google Cloud's name, like 'v5litepod-16'."""
        facts = GENERATIONS[self.generation]
        return f"{facts.prefix}-{self.chips * facts.count}"

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Chips of one host along each axis."""
        one_host = self.chips in GENERATIONS[self.generation].one_host
        return (*self.sides, 1)[:3] if one_host else (2, 2, 1)

    @property
    def sides(self) -> tuple[int, ...]:
        """Chips along each axis."""
        return tuple(int(side) for side in self.shape.split("x"))


def parse_topology(name: str) -> Topology:
    """Return the slice named 'v5e:4x4', 'v5litepod-16', 'v4-32' ...; UserError for unknown names lists known ones."""
    text, known = name.strip().lower(), _known()
    if text in known:
        return known[text]
    start = text.partition(":")[0].partition("-")[0]
    generation = next((key for key, facts in GENERATIONS.items() if start in (key, facts.prefix)), None)
    if generation is None:
        near = difflib.get_close_matches(text, known, n=1, cutoff=0.7)
        guess = f"did you mean {near[0]}? " if near else ""
        cure = f"{guess}write GENERATION:SHAPE like v5e:4x4; generations are {', '.join(GENERATIONS)}"
        raise UserError(f"no TPU topology {name!r}: {cure}")
    offered = dict.fromkeys(topology for topology in known.values() if topology.generation == generation)
    listed = ", ".join(f"{topology} ({topology.cloud})" for topology in offered)
    raise UserError(f"no TPU topology {name!r}: {generation} has {listed}")


def _known() -> dict[str, Topology]:
    """Return every name -> its slice."""
    slices = {}
    for generation, facts in GENERATIONS.items():
        for chips, shape in facts.shapes.items():
            topology = Topology(generation, shape)
            clouds = (f"{prefix}-{chips * facts.count}" for prefix in (facts.prefix, generation))
            names = (str(topology), f"{generation}:{shape}", *clouds)
            slices |= dict.fromkeys(names, topology)
    return slices
