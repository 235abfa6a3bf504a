"""Cloud TPU slices by their Google Cloud names: generation, chips, hosts, shape, and image of the VMs."""

import contextlib
import difflib
import re
from typing import NamedTuple

from data_pipelines.errors import UserError
from tpu.generations import CHIPS_PER_HOST, GENERATIONS
from tpu.topologies import parse_topology


class Accelerator(NamedTuple):
    """A slice."""

    name: str
    """The name for gcloud: 'v5litepod-16', also for 'v5e-16'."""
    generation: str
    """A key of GENERATIONS."""
    chips: int
    hosts: int
    topology: str
    """The shape in chips, such as '4x4'; '' for sizes without a usual shape."""
    runtime: str

    @property
    def devices(self) -> int:
        """The number of JAX devices; the two halves of a v2, v3 or v7x chip are a device each."""
        return self.chips * GENERATIONS[self.generation].device.per_chip

    @property
    def description(self) -> str:
        """A description for the user who launches a run on the slice."""
        shape = f" ({self.topology})" if self.topology else ""
        note = GENERATIONS[self.generation].note
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
    if ":" in name:  # as `plan` names it
        with contextlib.suppress(UserError):
            return f"; did you mean {parse_topology(name).cloud}?"
    both = [(prefix, facts) for key, facts in GENERATIONS.items() for prefix in (facts.prefix, key)]
    names = [f"{prefix}-{facts.count * chips}" for prefix, facts in both for chips in facts.shapes]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {near[0]}?" if near else ": use one such as v4-32, v5litepod-16, v5p-8 or v6e-8"
