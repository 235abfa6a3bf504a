"""What a chip can do at most, from its vendor's data sheet."""

# Dense bfloat16 FLOP/s by a part of jax.Device.device_kind, most specific first. For v2 and v3, JAX counts a core
# (half a chip) as a device.
_PEAK_FLOPS = (
    ("TPU v7", 2307e12),
    ("TPU v6", 918e12),
    ("TPU v5p", 459e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
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
