"""XLA's settings for the compiled steps, per platform; what `tpu plan` compiles is what runs.

Settings of the whole process (the CPU's, the compilation cache) are in `pretrain/commands/platform.py`, which runs
before JAX.
"""

import contextlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import jax
from jax.sharding import Mesh

from tpu.generations import generation_of

_OPTIONS: Mapping[str, Mapping[str, str | bool]] = {
    # Gathers of parameters and reductions of gradients run beside the products of other layers; off by default.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    # XLA:TPU schedules some of its collectives that way by itself, more of them below. With 16 MiB of vector memory, as
    # is usual, the tiles of a product that also reads or writes a second large array are small: bert-large's were 1.2
    # to 1.3 times as slow on v5p by the compiler's estimate. v4 has no more and ignores it.
    # Products are left whole where parameters are cut: passed on in rings, one part of 16 after the other, bert-large's
    # took 2.9 times as long on v5e:4x4, for 2.5 ms of waiting instead of 3.7 (benchmarks/results/plans_ledger.md).
    "tpu": {
        "xla_tpu_scoped_vmem_limit_kib": "49152",
        "xla_tpu_enable_windowed_einsum_for_all_gather": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    },
    "cpu": {},
}
# The process's flags leave YNNPACK no products, since large ones are as fast without. But with 8 rows Eigen's of a
# table or of turned weights take 1.5 times as long; and with two cores training steps of models of up to 11M parameters
# take 1.04 to 1.10 times as long, one of 124M 0.99.
# The option is a list in place of the flags': the reductions stay YNNPACK's by being named.
_LIBRARY = ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("INDIVIDUAL_DOT", "REDUCE"))
_SMALL_PRODUCTS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": _LIBRARY}}
# libtpu 0.0.42 crashes while it weighs to fuse a product into another, as in attention that is computed again for the
# backward pass, on v6e and wherever there is more than 16 MiB of vector memory.
_PRODUCTS_FUSED_SINCE = (0, 0, 48)
_PRODUCTS_APART = {"xla_tpu_dot_dot_fusion": False}

# XLA combines sums of gradients and makes no combined one asynchronous. Where at most so many bytes are combined each
# matrix's sum rides in the product of the next gradient: of bert-large's 28 ms of waiting on v5e:4x4 5 are left.
SUMS_BESIDE_PRODUCTS = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_jf_crs_combiner_threshold_in_bytes": str(4 * 2**20),
}
# Where parameters are cut the scattered sums of their gradients ride, as gathers do by themselves. In a loop over
# layers that costs the cores more than it saves: gpt2-xl's step took 319 ms on v5e:16x16 instead of 306.
PARTS_BESIDE_PRODUCTS = {
    "xla_enable_async_reduce_scatter_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_ars_combiner_threshold_in_bytes": str(4 * 2**20),
}
# On v5p and v6e libtpu 0.0.42 takes these options, too, and dies of some shapes; 0.0.48 refuses them there, since they
# may lead to wrong results. v7x's sums are asynchronous by themselves.
_BESIDE_PRODUCTS = ("v5e",)
_BESIDE_PRODUCTS_IN = (0, 0, 42), (0, 0, 48)  # the first and last libtpu known to have these options


def platform_options(platform: str) -> dict[str, str | bool]:
    """XLA's settings for 'cpu', 'gpu' or 'tpu', with the compiler that is installed."""
    old = platform == "tpu" and _libtpu() < _PRODUCTS_FUSED_SINCE
    return {**_OPTIONS[platform], **(_PRODUCTS_APART if old else {})}


def _libtpu() -> tuple[int, ...]:
    """Its version; () where no package tells it."""
    try:
        return tuple(int(part) for part in version("libtpu").split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return ()


def compiler_options(mesh: Mesh, looped: bool = False) -> dict[str, str | bool]:
    """For `jax.jit` of a program on the mesh.   looped: whether it runs through its layers in a loop."""
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
    """Whether on such chips collectives ride in products, of the meshes that `_beside_products` has options for."""
    generation, (first, last) = generation_of(device_kind), _BESIDE_PRODUCTS_IN
    return generation is not None and generation.xla in _BESIDE_PRODUCTS and first <= _libtpu() <= last


def small_product_options(mesh: Mesh, looped: bool = False) -> dict[str, str | bool]:
    """`compiler_options` of a program whose products mostly are small: of few rows, as in a loop over tokens, or of a
    small model's matrices."""
    return compiler_options(mesh, looped) | _SMALL_PRODUCTS.get(mesh.devices.flat[0].platform, {})


def matmul_precision(dtype: str) -> contextlib.AbstractContextManager:
    """In force while a program is traced: float32 products are float32, not bfloat16 (TPU) or TF32 (GPU)."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
