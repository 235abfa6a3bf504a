"""Facts about each generation of Google's TPUs: names, slices, images, peaks, memory, links, and what compiles.

Sources: Google's TPU documentation, a page per generation, and "TPU software versions"; for links of v2 and v3 "A
Domain Specific Supercomputer for Training Deep Neural Networks"; bandwidth between slices: v5e 6.4 and v6e 25.6 Tbit/s
per pod of 256 chips, v5p 50 and v7x 100 Gbit/s per chip, v4 25 GB/s per host of 4 chips ("How to scale your model",
jax-ml.github.io/scaling-book). Type and image of v7x are those of Google's own benchmarks: its documentation offers v7x
by GKE and Compute Engine, no longer to new users of the Cloud TPU API.
"""

from collections.abc import Mapping
from typing import NamedTuple

GIB = 2**30


class Tpu(NamedTuple):
    """One JAX device: a chip, or half of a chip if `per_chip` is 2.

    peak_flops: dense bfloat16 FLOP/s.   clock: Hz of its cores, the unit of XLA:TPU's estimated cycles; it is the peak
        divided by the FLOPs of all matrix units in a cycle.
    hbm: bytes that XLA:TPU allows a program, by its message for programs that do not fit.
    hbm_bandwidth: bytes/s.   cores: number of cores that share its work.
    slice_bandwidth: bytes/s to other slices, its share of its host's network cards; 0 if slices cannot be joined.
    For the whole chip: ici_bandwidth: bytes/s to other chips over all links.   axes: of the torus of chips.
        ring: length of an axis whose ends are linked; with three axes, all lengths must be multiples of it.
    """

    peak_flops: float
    clock: float
    hbm: float
    hbm_bandwidth: float
    cores: int
    slice_bandwidth: float
    ici_bandwidth: float
    axes: int
    ring: int
    per_chip: int = 1


class Generation(NamedTuple):
    """prefix: of gcloud's names, the 'v5litepod' of 'v5litepod-16'.   count: what the number in a name counts for each
        chip: 2 if it counts TensorCores, 1 if it counts chips.
    one_host: sizes, in chips, of slices with a single VM; larger slices have VMs with 4 chips each.
    runtime: the image for JAX (gcloud's --version).   shapes: chips -> topology, for the usual sizes.
    others: whether other multiples of 4 chips also exist.
    xla: name in XLA's topologies.   options: for `jax.experimental.topologies`.
    gke: name in GKE, for slices of several hosts; '' if GKE has none.
    kinds: parts of jax.Device.device_kind; the longest match counts.
    kernels: whether fused kernels compile: Mosaic has no bfloat16 attention for v2 and v3.
    biased: the longest row, in tokens, whose bias of the scores fits on the chip with its gradient.
    note: a remark for users who launch a run.
    """

    prefix: str
    count: int
    one_host: tuple[int, ...]
    runtime: str
    shapes: Mapping[int, str]
    others: bool
    xla: str
    gke: str
    kinds: tuple[str, ...]
    device: Tpu
    kernels: bool = True
    biased: int = 1024
    note: str = ""
    options: Mapping[str, str] = {}


CHIPS_PER_HOST = 4  # in slices with several hosts
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
_BASE = "tpu-ubuntu2204-base"
_PLAIN = "has no fused attention: --attention xla is what it takes"
# Without this option the compiler treats each of a v4 chip's two cores as a device, unlike JAX on a real v4.
_MEGACORE = {"chip_config_name": "megacore"}

# fmt: off
GENERATIONS: dict[str, Generation] = {
    "v2": Generation(
        "v2", 2, (4,), _BASE, _V2, False, "v2", "", ("TPU v2",),
        Tpu(22.5e12, 0.7e9, 7.48 * GIB, 300e9, 1, 0.0, 248e9, 2, 16, per_chip=2), kernels=False, note=_PLAIN,
    ),
    "v3": Generation(
        "v3", 2, (4,), _BASE, _PLANES, False, "v3", "tpu-v3-slice", ("TPU v3",),
        Tpu(61.5e12, 0.94e9, 15.48 * GIB, 450e9, 1, 0.0, 328e9, 2, 32, per_chip=2), kernels=False, note=_PLAIN,
    ),
    "v4": Generation(
        "v4", 2, (4,), _BASE, _CUBES, True, "v4", "tpu-v4-podslice", ("TPU v4",),
        Tpu(275e12, 1.05e9, 30.75 * GIB, 1.2e12, 2, 6.25e9, 300e9, 3, 4), biased=768, options=_MEGACORE,
    ),
    "v5e": Generation(
        "v5litepod", 1, (1, 4, 8), "v2-alpha-tpuv5-lite", _EFFICIENT, False, "v5e", "tpu-v5-lite-podslice",
        ("TPU v5 lite", "TPU v5e"),
        Tpu(197e12, 1.5e9, 15.75 * GIB, 819e9, 1, 3.125e9, 200e9, 2, 16),
    ),
    "v5p": Generation(
        "v5p", 2, (4,), "v2-alpha-tpuv5", _CUBES_V5P, True, "v5p", "tpu-v5p-slice", ("TPU v5", "TPU v5p"),
        Tpu(459e12, 1.75e9, 95.74 * GIB, 2765e9, 2, 6.25e9, 600e9, 3, 4),
    ),
    "v6e": Generation(
        "v6e", 1, (1, 4, 8), "v2-alpha-tpuv6e", _EFFICIENT, False, "v6e", "tpu-v6e-slice", ("TPU v6",),
        Tpu(918e12, 1.75e9, 31.25 * GIB, 1638e9, 1, 12.5e9, 400e9, 2, 16),
    ),
    "v7x": Generation(
        "tpu7x", 2, (4,), "v2-alpha-tpu7-ubuntu2404", _CUBES, True, "tpu7x", "tpu7x", ("TPU7x",),
        Tpu(2307e12 / 2, 2.2e9, 94.75 * GIB, 7380e9 / 2, 1, 12.5e9 / 2, 600e9, 3, 4, per_chip=2),
        note="is for projects that Google admits to it; others: tpu/gke.md",
    ),
}
# fmt: on


def generation_of(device_kind: str) -> Generation | None:
    """Return the generation of a jax.Device, None if it is no known TPU."""
    matching = {kind: facts for facts in GENERATIONS.values() for kind in facts.kinds if kind in device_kind}
    return matching[max(matching, key=len)] if matching else None


def tpu_of(device_kind: str) -> Tpu | None:
    """Return the facts about a jax.Device, None if it is no known TPU."""
    generation = generation_of(device_kind)
    return generation and generation.device
