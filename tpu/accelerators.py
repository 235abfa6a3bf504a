"""Cloud TPU slices by the names that Google Cloud gives them: generation, chips, hosts, shape, and their VMs' image."""

import difflib
import re
from typing import NamedTuple

from data_pipelines.errors import UserError
from tpu.generations import CHIPS_PER_HOST, GENERATIONS


class Accelerator(NamedTuple):
    """One slice."""

    name: str
    """As gcloud writes it: 'v5litepod-16', also when it was asked for as 'v5e-16'."""
    generation: str
    """A key of GENERATIONS."""
    chips: int
    hosts: int
    topology: str
    """Such as '4x4'; '' where the size has no usual shape."""
    runtime: str

    @property
    def devices(self) -> int:
        """As JAX counts: the two halves of a v2, v3 or v7x chip are a device each."""
        return self.chips * GENERATIONS[self.generation].device.per_chip

    @property
    def description(self) -> str:
        """For who launches a run there."""
        shape = f" ({self.topology})" if self.topology else ""
        note = GENERATIONS[self.generation].note
        said = f"{self.name}, chips {self.chips}{shape}, hosts {self.hosts}"
        return f"{said}; {self.generation} {note}" if note else said


def parse_accelerator(name: str) -> Accelerator:
    """`v2-8`, `v4-128`, `v5e-16` or `v5litepod-16`, `v6e-64` ... -> the slice. Raises UserError for any other name."""
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", name)
    found = {key: one for key, one in GENERATIONS.items() if match and match[1] in (key, one.prefix)}
    if not found:
        raise UserError(f"--type {name}: not the name of a TPU slice{_near(name)}")
    [(key, generation)] = found.items()
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
    both = [(prefix, one) for key, one in GENERATIONS.items() for prefix in (one.prefix, key)]
    names = [f"{prefix}-{one.count * chips}" for prefix, one in both for chips in one.shapes]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {near[0]}?" if near else ": use one such as v4-32, v5litepod-16, v5p-8 or v6e-8"
