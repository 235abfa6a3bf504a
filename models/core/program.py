"""How a model is compiled: settings that change speed and memory, never the mathematics."""

import dataclasses
import re

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass(frozen=True)
class Program:
    """dtype: of activations and matrix products (parameters, losses and softmax stay float32).
    depth: 'scan' compiles one layer and loops over it, 'unroll' compiles every layer.
    attention: 'xla', plain operations; of a sparse pattern those that are faster, 'dense' or 'blocked', unless one of
        them is named; or fused kernels by their names in `models/attention/kernels/table.py`, joined by '+': each layer
        takes the first that can compute what it asks.
    remat: 'none' keeps all activations for the backward pass, 'dots' only what is marked as `kept`, from which no large
        matrix product has to be computed again, 'full' each layer's input.
    """

    dtype: str = "float32"
    depth: str = "scan"
    remat: str = "none"
    attention: str = "xla"

    def __post_init__(self):
        for field, allowed in _ALLOWED.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"program.{field}={getattr(self, field)!r}: use one of {', '.join(allowed)}")

    @property
    def compute(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)


PLAIN = ("xla", "dense", "blocked")  # attention in plain operations
_ALLOWED = {
    "dtype": ("float32", "bfloat16"),
    "depth": ("scan", "unroll"),
    "remat": ("none", "dots", "full"),
}


KEPT = "kept"


def kept(x: Array) -> Array:
    """x, marked as what rematerialisation 'dots' keeps."""
    return checkpoint_name(x, KEPT)


def default(platform: str | None = None, capability: str | None = None) -> Program:
    """The measured best for 'cpu', 'gpu' or 'tpu'; without a platform, for the device that JAX runs on.

    capability: of a GPU, as its vendor counts ('7.5'); None for a recent one.
    """
    if platform is None:
        platform = jax.default_backend()
        capability = getattr(jax.local_devices()[0], "compute_capability", None)
    if platform == "cpu":
        # XLA:CPU runs a scanned layer slower: the loop's slices are copies, and it has no bfloat16 products.
        return Program(dtype="float32", depth="unroll")
    # NVIDIA's GPUs have bfloat16 products from compute capability 8.0 on (Ampere): V100 and T4 have none.
    old = platform == "gpu" and re.fullmatch(r"[1-7]\.\d", capability or "")
    # What lies between two products costs less to compute again than to keep: bert-large with 64 rows of 512 on a v5p
    # chip took 66 GB for activations and a fifth of its estimated time to write them.
    return Program(dtype="float32" if old else "bfloat16", depth="scan", remat="dots")
