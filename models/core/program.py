"""How a model is compiled: settings that change speed and memory, never the mathematics."""

import dataclasses
import re

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from models.core.ranges import check_choices


@dataclasses.dataclass(frozen=True)
class Program:
    """dtype: of activations and matrix products (parameters, losses and softmax stay float32).
    depth: 'scan' compiles one layer and loops over it, 'unroll' compiles every layer.
    attention: 'xla' uses plain operations; for a sparse pattern the faster of 'dense' and 'blocked', which may also be
        named. Or names of fused kernels in `models/attention/kernels/table.py`, joined by '+': each layer takes the
        first one that can compute its attention.
    remat: 'none' keeps all activations for the backward pass; 'dots' keeps only what is marked as `kept`, so that no
        large matrix product is computed again; 'full' keeps only each layer's input.
    """

    dtype: str = "float32"
    depth: str = "scan"
    remat: str = "none"
    attention: str = "xla"

    def __post_init__(self):
        check_choices(self, _ALLOWED, "program.")

    @property
    def compute(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)


PLAIN = ("xla", "dense", "blocked")  # attention in plain operations
_ALLOWED = {"dtype": ("float32", "bfloat16"), "depth": ("scan", "unroll"), "remat": ("none", "dots", "full")}


KEPT = "kept"


def kept(x: Array) -> Array:
    """Mark x as an activation that remat 'dots' keeps."""
    return checkpoint_name(x, KEPT)


def default(platform: str | None = None, capability: str | None = None) -> Program:
    """Return the settings that measured best for 'cpu', 'gpu' or 'tpu'; by default for the device that JAX runs on.
    capability: compute capability of an NVIDIA GPU ('7.5'); None for a recent one."""
    if platform is None:
        platform = jax.default_backend()
        capability = getattr(jax.local_devices()[0], "compute_capability", None)
    if platform == "cpu":
        # XLA:CPU runs scanned layers slower, because the loop's slices are copies, and has no bfloat16 products.
        return Program(dtype="float32", depth="unroll")
    # NVIDIA GPUs have bfloat16 products from compute capability 8.0 (Ampere) on; V100 and T4 have none.
    old = platform == "gpu" and re.fullmatch(r"[1-7]\.\d", capability or "")
    # The operations between two products cost less to repeat than their results cost to keep: bert-large with 64 rows
    # of 512 tokens on a v5p chip took 66 GB for activations, and a fifth of its estimated time to write them.
    return Program(dtype="float32" if old else "bfloat16", depth="scan", remat="dots")
