"""XLA's settings for the compiled steps, per platform; what `tpu plan` compiles is what runs.

Settings of the whole process (the CPU's, the compilation cache) are in `pretrain/platform.py`, which runs before JAX.
"""

import contextlib
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

COMPILER_OPTIONS: Mapping[str, Mapping[str, str | bool]] = {
    # Gathers of parameters and reductions of gradients run beside the products of other layers; off by default.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    # XLA:TPU schedules its collectives that way by itself. With 16 MiB of vector memory, as is usual, the tiles of a
    # product that also reads or writes a second large array are small: bert-large's were 1.2 to 1.3 times as slow on
    # v5p by the compiler's estimate. v4 has no more and ignores it.
    "tpu": {"xla_tpu_scoped_vmem_limit_kib": "49152"},
    "cpu": {},
}


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """For `jax.jit` of a program on the mesh."""
    platform = mesh.devices.flat[0].platform
    return dict(COMPILER_OPTIONS["gpu" if platform in ("cuda", "rocm") else platform])


def matmul_precision(dtype: str) -> contextlib.AbstractContextManager:
    """In force while a program is traced: float32 products are float32, not bfloat16 (TPU) or TF32 (GPU)."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
