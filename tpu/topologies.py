"""Names of TPU slices: `v5e:4x4` gives a shape in chips, `v5litepod-16` and `v4-32` are Google Cloud's names."""

import difflib
import math
from typing import NamedTuple

from data_pipelines.errors import UserError

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
CHIPS_PER_HOST = 4  # of slices with several hosts; up to 8 chips of v5e and v6e share one host


class Generation(NamedTuple):
    """shapes: what Google Cloud offers, the smallest first.   cloud: how its names begin; the first is preferred.
    cores: that a cloud name counts for each chip.   options: for `jax.experimental.topologies`.
    """

    shapes: tuple[str, ...]
    cloud: tuple[str, ...]
    cores: int
    options: dict[str, str]


GENERATIONS: dict[str, Generation] = {
    # Without 'megacore' the compiler takes each of a v4 chip's two cores for a device, unlike JAX on a real v4.
    "v4": Generation(_DEEP, ("v4",), 2, {"chip_config_name": "megacore"}),
    "v5e": Generation(_FLAT, ("v5litepod", "v5e"), 1, {}),
    "v5p": Generation((*_DEEP, "16x16x16", "16x16x24"), ("v5p",), 2, {}),
    "v6e": Generation(_FLAT, ("v6e",), 1, {}),
}


class Topology(NamedTuple):
    """One slice.   generation: a key of GENERATIONS.   shape: like '4x4'."""

    generation: str
    shape: str

    def __str__(self) -> str:
        return f"{self.generation}:{self.shape}"

    @property
    def chips(self) -> int:
        return math.prod(self._sides)

    @property
    def hosts(self) -> int:
        return 1 if self._one_host else self.chips // CHIPS_PER_HOST

    @property
    def cloud(self) -> str:
        """Google Cloud's name, like 'v5litepod-16'."""
        generation = GENERATIONS[self.generation]
        return f"{generation.cloud[0]}-{self.chips * generation.cores}"

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Chips of one host along each axis."""
        return (*self._sides, 1)[:3] if self._one_host else (2, 2, 1)

    @property
    def _sides(self) -> tuple[int, ...]:
        return tuple(int(side) for side in self.shape.split("x"))

    @property
    def _one_host(self) -> bool:
        return self.chips <= (CHIPS_PER_HOST if len(self._sides) == 3 else 8)


def parse_topology(name: str) -> Topology:
    """'v5e:4x4', 'v5litepod-16', 'v4-32' -> the slice; UserError with what exists."""
    text = name.strip().lower()
    known = _known()
    if text in known:
        return known[text]
    generation = text.partition(":")[0].partition("-")[0]
    generation = next((g for g, facts in GENERATIONS.items() if generation in (g, *facts.cloud)), None)
    if generation is None:
        near = difflib.get_close_matches(text, known, n=1, cutoff=0.7)
        guess = f"did you mean {near[0]}? " if near else ""
        generations = ", ".join(GENERATIONS)
        raise UserError(f"no TPU topology {name!r}: {guess}write GENERATION:SHAPE like v5e:4x4, of {generations}")
    offered = [topology for topology in known.values() if topology.generation == generation]
    listed = ", ".join(f"{topology} ({topology.cloud})" for topology in dict.fromkeys(offered))
    raise UserError(f"no TPU topology {name!r}: {generation} has {listed}")


def _known() -> dict[str, Topology]:
    """Every name -> its slice."""
    found = {}
    for generation, facts in GENERATIONS.items():
        for shape in facts.shapes:
            topology = Topology(generation, shape)
            found[str(topology)] = topology
            found |= {f"{prefix}-{topology.chips * facts.cores}": topology for prefix in facts.cloud}
    return found
