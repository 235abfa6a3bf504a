"""What a chip can do at most: its vendor's data sheet, and what XLA:TPU says of it."""

from typing import NamedTuple


class Tpu(NamedTuple):
    """One TPU generation, per chip.

    peak_flops: dense bfloat16 FLOP/s.   clock: Hz of its cores, in which XLA:TPU estimates an operation's cycles; the
        peak divided by the FLOPs of all matrix units in a cycle.
    hbm: bytes that XLA:TPU lets one program have; a little less than the data sheet's 16, 32 or 95 GB.
    hbm_bandwidth: bytes/s.   ici_bandwidth: bytes/s that leave the chip over all of its links to other chips.
    axes: of the torus that the links form.   slice_bandwidth: bytes/s that a chip's share of its host's network cards
        sends to other slices.   cores: that share the work of a chip.
    """

    peak_flops: float
    clock: float
    hbm: float
    hbm_bandwidth: float
    ici_bandwidth: float
    axes: int
    slice_bandwidth: float
    cores: int


GIB = 2**30

# Google's TPU documentation, a page per generation; `hbm` from the compiler's message on a program that does not fit.
# Between slices v5e has 6.4 and v6e 25.6 Tbit/s a pod of 256 chips, v5p 50 Gbit/s a chip; "How to scale your
# model" (jax-ml.github.io/scaling-book) says 25 GB/s a host of 4 chips of v4.
TPUS: dict[str, Tpu] = {
    "v4": Tpu(275e12, 1.05e9, 30.75 * GIB, 1.2e12, 300e9, 3, 6.25e9, 2),
    "v5e": Tpu(197e12, 1.5e9, 15.75 * GIB, 819e9, 200e9, 2, 3.125e9, 1),
    "v5p": Tpu(459e12, 1.75e9, 95.74 * GIB, 2765e9, 600e9, 3, 6.25e9, 2),
    "v6e": Tpu(918e12, 1.75e9, 31.25 * GIB, 1638e9, 400e9, 2, 12.5e9, 1),
}

# Dense bfloat16 FLOP/s by a part of jax.Device.device_kind, most specific first. For v2, v3 and v7x, JAX counts a core
# (half a chip) as a device.
_PEAK_FLOPS = (
    ("TPU7x", 2307e12 / 2),
    ("TPU v7", 2307e12),
    ("TPU v6", TPUS["v6e"].peak_flops),
    ("TPU v5p", TPUS["v5p"].peak_flops),
    ("TPU v5 lite", TPUS["v5e"].peak_flops),
    ("TPU v5e", TPUS["v5e"].peak_flops),
    ("TPU v5", TPUS["v5p"].peak_flops),
    ("TPU v4", TPUS["v4"].peak_flops),
    ("TPU v3", 61.5e12),
    ("TPU v2", 22.5e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("T4", 65e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device, None when it is not in the table (CPUs are not)."""
    return next((peak for name, peak in _PEAK_FLOPS if name in device_kind), None)


# By a part of jax.Device.device_kind, most specific first; only kinds of which a device is a chip.
_KINDS = (("TPU v6", "v6e"), ("TPU v5p", "v5p"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v4", "v4"))


def tpu_of(device_kind: str) -> Tpu | None:
    """The chip that a device is, None where it is no TPU of the table."""
    return next((TPUS[generation] for name, generation in _KINDS if name in device_kind), None)
