"""Cloud TPU slices by the names that Google Cloud gives them: generation, chips, hosts, shape, and their VMs' image.

Sources: Google Cloud's pages "TPU v2" to "TPU v6e" (supported configurations), "TPU software versions".
"""

import difflib
import re
from typing import NamedTuple

from data_pipelines.errors import UserError


class Generation(NamedTuple):
    """What the slices of a generation share."""

    prefix: str
    """Of gcloud's names: the 'v5litepod' of 'v5litepod-16'."""
    count: int
    """What the number in a name counts, per chip: 2 where it counts TensorCores, 1 where it counts chips."""
    one_host: tuple[int, ...]
    """Chips of the slices that are a single VM; larger slices have 4 chips on each VM."""
    runtime: str
    """The image for JAX (gcloud's --version)."""
    shapes: dict[int, str]
    """Chips -> topology, of the usual sizes."""
    others: bool
    """Other multiples of 4 chips exist too (the 3D tori of v4 and v5p)."""


_PLANES = {4: "2x2", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16", 512: "16x32", 1024: "32x32"}
_EFFICIENT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
}
_CUBES_V5P = {**_CUBES, 4096: "16x16x16", 6144: "16x16x24"}
_V2 = {chips: _PLANES[chips] for chips in (4, 16, 64, 128, 256)}

GENERATIONS = {
    "v2": Generation("v2", 2, (4,), "tpu-ubuntu2204-base", _V2, False),
    "v3": Generation("v3", 2, (4,), "tpu-ubuntu2204-base", _PLANES, False),
    "v4": Generation("v4", 2, (4,), "tpu-ubuntu2204-base", _CUBES, True),
    "v5e": Generation("v5litepod", 1, (1, 4, 8), "v2-alpha-tpuv5-lite", _EFFICIENT, False),
    "v5p": Generation("v5p", 2, (4,), "v2-alpha-tpuv5", _CUBES_V5P, True),
    "v6e": Generation("v6e", 1, (1, 4, 8), "v2-alpha-tpuv6e", _EFFICIENT, False),
}
_CHIPS_PER_HOST = 4


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
        """As JAX counts: the two cores of a v2 or v3 chip are a device each."""
        return self.chips * (2 if self.generation in ("v2", "v3") else 1)


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
    if rest or not (usual or (generation.others and chips and chips % _CHIPS_PER_HOST == 0)):
        counted = "chips" if generation.count == 1 else "TensorCores, two to a chip"
        sizes = ", ".join(str(generation.count * chips) for chips in generation.shapes)
        raise UserError(f"--type {name}: {key} has no slice of {number} (the number counts {counted}): use {sizes}")
    hosts = 1 if chips in generation.one_host else chips // _CHIPS_PER_HOST
    shape = generation.shapes.get(chips, "")
    return Accelerator(f"{generation.prefix}-{number}", key, chips, hosts, shape, generation.runtime)


def _near(name: str) -> str:
    names = [f"{one.prefix}-{one.count * chips}" for one in GENERATIONS.values() for chips in one.shapes]
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ": use one such as v4-32, v5litepod-16, v5p-8 or v6e-8"
