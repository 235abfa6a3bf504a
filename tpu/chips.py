"""What a device can do at most: its vendor's data sheet."""

from tpu.generations import tpu_of

# Dense bfloat16 FLOP/s of GPUs by a part of jax.Device.device_kind, most specific first.
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
    """Dense bfloat16 FLOP/s of a device, None when it is not in the tables (CPUs are not)."""
    if tpu := tpu_of(device_kind):
        return tpu.peak_flops
    return next((peak for name, peak in _GPUS if name in device_kind), None)
