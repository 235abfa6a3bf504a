"""Peak FLOP/s of devices, from their vendors' data sheets."""

from tpu.generations import tpu_of

# Part of jax.Device.device_kind -> dense bfloat16 FLOP/s of a GPU; the most specific part first.
_GPUS = (
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
    """Return the dense bfloat16 FLOP/s of a device; None if it is not in the tables (CPUs are not)."""
    if tpu := tpu_of(device_kind):
        return tpu.peak_flops
    return next((peak for name, peak in _GPUS if name in device_kind), None)
