"""XLA options of compiled steps, by platform; `tpu plan` compiles with the same options as a run.

Settings of the whole process (for CPUs, the compilation cache) are in `pretrain/commands/platform.py`, which runs
before JAX.
"""

import contextlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import jax
from jax.sharding import Mesh

from tpu.generations import generation_of

_OPTIONS: Mapping[str, Mapping[str, str | bool]] = {
    # Overlaps gathers of parameters and reductions of gradients with the products of other layers; off by default.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    # XLA:TPU overlaps some collectives by itself, and more with the options below. Vector memory: with the usual 16
    # MiB, the tiles of a product that also reads or writes a second large array are small; bert-large's products were
    # 1.2 to 1.3 times as slow on v5p by the compiler's estimate. v4 has no more memory and ignores the option.
    # Windowed einsum: sharded parameters would be passed around in rings, in 16 parts, and products cut accordingly;
    # bert-large's took 2.9 times as long on v5e:4x4, to wait 2.5 ms instead of 3.7
    # (benchmarks/results/plans_ledger.md).
    "tpu": {
        "xla_tpu_scoped_vmem_limit_kib": "49152",
        "xla_tpu_enable_windowed_einsum_for_all_gather": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    },
    "cpu": {},
}
# The process's flags give YNNPACK no products, because large ones are as fast without it. But with 8 rows, Eigen takes
# 1.5 times as long for products with a table or with turned weights; and on two cores, Eigen's training steps take 1.04
# to 1.10 times as long for models of up to 11M parameters, and 0.99 for one of 124M.
# This option replaces the list in the flags, so it names reductions, too, which stay with YNNPACK.
_LIBRARY = ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("INDIVIDUAL_DOT", "REDUCE"))
_SMALL_PRODUCTS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": _LIBRARY}}
# libtpu 0.0.42 crashes while it considers fusing a product into another, as in attention that is recomputed for the
# backward pass, on v6e and wherever vector memory is more than 16 MiB.
_PRODUCTS_FUSED_SINCE = (0, 0, 48)
_PRODUCTS_APART = {"xla_tpu_dot_dot_fusion": False}

# XLA combines sums of gradients, and does not make combined sums asynchronous. If at most this many bytes are combined,
# each matrix's sum overlaps with the product of the next gradient: bert-large then waits 5 ms on v5e:4x4 instead of 28.
SUMS_BESIDE_PRODUCTS = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_jf_crs_combiner_threshold_in_bytes": str(4 * 2**20),
}
# With sharded parameters, the scattered sums of gradients overlap with products (gathers do so by default). In a loop
# over layers that costs the cores more than it saves: gpt2-xl's step took 319 ms on v5e:16x16 instead of 306.
PARTS_BESIDE_PRODUCTS = {
    "xla_enable_async_reduce_scatter_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_ars_combiner_threshold_in_bytes": str(4 * 2**20),
}
# On v5p and v6e, libtpu 0.0.42 accepts these options but crashes for some shapes, and 0.0.48 refuses them, because they
# may give wrong results. On v7x sums are asynchronous by default.
_BESIDE_PRODUCTS = ("v5e",)
_BESIDE_PRODUCTS_IN = (0, 0, 42), (0, 0, 48)  # the first and last libtpu known to have these options


def platform_options(platform: str) -> dict[str, str | bool]:
    """Return the XLA options for 'cpu', 'gpu' or 'tpu' and the installed compiler."""
    old = platform == "tpu" and _libtpu() < _PRODUCTS_FUSED_SINCE
    return {**_OPTIONS[platform], **(_PRODUCTS_APART if old else {})}


def _libtpu() -> tuple[int, ...]:
    """Return libtpu's version; () if no such package is installed."""
    try:
        return tuple(int(part) for part in version("libtpu").split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return ()


def compiler_options(mesh: Mesh, looped: bool = False) -> dict[str, str | bool]:
    """Return the options for `jax.jit` of a program on the mesh.   looped: whether it loops over its layers."""
    device = mesh.devices.flat[0]
    options = platform_options("gpu" if device.platform in ("cuda", "rocm") else device.platform)
    return options | (_beside_products(mesh.shape, looped) if rides_in_products(device.device_kind) else {})


def _beside_products(axes: Mapping[str, int], looped: bool) -> Mapping[str, str | bool]:
    if axes["sequence"] * axes["tensor"] > 1:
        return {}
    if axes["fsdp"] > 1:
        return {} if looped else PARTS_BESIDE_PRODUCTS
    return SUMS_BESIDE_PRODUCTS if axes["slice"] == 1 < axes["data"] else {}


def rides_in_products(device_kind: str) -> bool:
    """Return whether collectives overlap with products on such chips, on meshes with options in `_beside_products`."""
    generation, (first, last) = generation_of(device_kind), _BESIDE_PRODUCTS_IN
    return generation is not None and generation.xla in _BESIDE_PRODUCTS and first <= _libtpu() <= last


def small_product_options(mesh: Mesh, looped: bool = False) -> dict[str, str | bool]:
    """Return `compiler_options` for a program with mostly small products: of few rows, as in a loop over tokens, or of
    a small model's matrices."""
    return compiler_options(mesh, looped) | _SMALL_PRODUCTS.get(mesh.devices.flat[0].platform, {})


def matmul_precision(dtype: str) -> contextlib.AbstractContextManager:
    """Return a context for tracing in which float32 products are float32, not bfloat16 (TPU) or TF32 (GPU)."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
