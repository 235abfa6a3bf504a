"""Slices of TPUs, named by shape in chips (`v5e:4x4`) or as in Google Cloud (`v5litepod-16`)."""

import difflib
import math
import re
from typing import NamedTuple

from data_pipelines.errors import UserError
from tpu.generations import CHIPS_PER_HOST, GENERATIONS, Tpu


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


class Accelerator(NamedTuple):
    """A slice in Google Cloud.   name: 'v5litepod-16', also for 'v5e-16'.   generation: a key of GENERATIONS.
    topology: the shape in chips, such as '4x4'; '' for sizes without a usual shape.   runtime: image of the VMs."""

    name: str
    generation: str
    chips: int
    hosts: int
    topology: str
    runtime: str

    @property
    def devices(self) -> int:
        """The number of JAX devices; the two halves of a v2, v3 or v7x chip are a device each."""
        return self.chips * GENERATIONS[self.generation].device.per_chip

    @property
    def description(self) -> str:
        """A description for the user who launches a run on the slice."""
        shape, note = f" ({self.topology})" if self.topology else "", GENERATIONS[self.generation].note
        said = f"{self.name}, chips {self.chips}{shape}, hosts {self.hosts}"
        return f"{said}; {self.generation} {note}" if note else said


def parse_accelerator(name: str) -> Accelerator:
    """Return the slice named `v2-8`, `v4-128`, `v5e-16` or `v5litepod-16`, `v6e-64` ...; UserError for other names."""
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", name)
    named = {key: facts for key, facts in GENERATIONS.items() if match and match[1] in (key, facts.prefix)}
    if not named:
        raise UserError(f"--type {name}: not the name of a TPU slice{_near(name)}")
    [(key, generation)] = named.items()
    number = int(match[2])
    chips, rest = divmod(number, generation.count)
    usual = chips in generation.shapes
    if rest or not (usual or (generation.others and chips and chips % CHIPS_PER_HOST == 0)):
        counted = "chips" if generation.count == 1 else "TensorCores, two to a chip"
        sizes = ", ".join(str(generation.count * chips) for chips in generation.shapes)
        raise UserError(f"--type {name}: {key} has no slice of {number} (the number counts {counted}): use {sizes}")
    hosts = 1 if chips in generation.one_host else chips // CHIPS_PER_HOST
    shape = generation.shapes.get(chips, "")
    return Accelerator(f"{generation.prefix}-{number}", key, chips, hosts, shape, generation.runtime)


def _near(name: str) -> str:
    known = _known()
    if name in known:  # as `plan` names it
        return f"; did you mean {known[name].cloud}?"
    near = difflib.get_close_matches(name.lower(), [one for one in known if ":" not in one], n=1)
    return f"; did you mean {near[0]}?" if near else ": use one such as v4-32, v5litepod-16, v5p-8 or v6e-8"


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
