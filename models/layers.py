"""The blocks that families share: dense, norm, embeddings, the layer stack."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.noise import fold
from models.parameters import LAYERS, Keys
from models.program import Program

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),  # Hendrycks & Gimpel 2016, by the error function
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Dense(nn.Module):
    """x [..., in] -> x @ kernel + bias [..., features]; kernel f32[in, features], bias f32[features]."""

    features: int
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        # One [rows, in] x [in, features] product: XLA:CPU is slower on [batch, length, in].
        rows = x.astype(self.dtype).reshape(-1, x.shape[-1])
        y = rows @ kernel.astype(self.dtype) + bias.astype(self.dtype)
        return y.reshape(*x.shape[:-1], self.features)


class Norm(nn.Module):
    """Layer normalisation over the last axis in float32 (Ba et al. 2016, equation 4); returns `dtype`."""

    epsilon: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(self.dtype)


def stack(parent: nn.Module, layer: nn.Module, depth: int, x: Array, mask, keys: Keys, program: Program) -> Array:
    """Apply `depth` layers of equal shape to x [batch, length, width].

    The parameters are always stored stacked under 'layers' [depth, ...], whether the program scans or unrolls.
    layer: an unbound module, called as layer(x, mask, keys) -> x.
    """

    def init(key: Array) -> dict:
        one = lambda k: layer.init(k, x, mask, None)["params"]
        return jax.vmap(one)(jax.random.split(key, depth))

    params = parent.param(LAYERS, init)

    def apply(x: Array, params_and_index) -> tuple[Array, None]:
        params, index = params_and_index
        layer_keys = None if keys is None else fold(keys, index)
        return layer.apply({"params": params}, x, mask, layer_keys), None

    if program.remat != "none":
        policy = jax.checkpoint_policies.checkpoint_dots if program.remat == "dots" else None
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=program.depth == "unroll")

    if program.depth == "scan":
        return jax.lax.scan(apply, x, (params, jnp.arange(depth)))[0]
    arrays, structure = jax.tree.flatten(params)
    slices = zip(*(jnp.unstack(array) for array in arrays), strict=True)  # indexing w[i] in every layer copies more
    for index, layer_arrays in enumerate(slices):
        x, _ = apply(x, (structure.unflatten(layer_arrays), index))
    return x


def padded_vocab(vocab_size: int) -> int:
    """Rows of the embedding table: the vocabulary rounded up to a multiple of 128, the lanes of a TPU."""
    return -(-vocab_size // 128) * 128


def tied_logits(hidden: Array, table: Array, bias: Array, vocab_size: int) -> Array:
    """hidden [n, width], embedding table f32[padded, width], bias f32[padded] -> logits f32[n, padded].

    The padding rows get -inf, so that they carry no probability and no gradient.
    """
    logits = jnp.einsum("nw,vw->nv", hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32)
    logits = logits + bias
    if table.shape[0] == vocab_size:
        return logits
    return jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, -jnp.inf)


def gather_rows(x: Array, positions: Array) -> Array:
    """x [batch, length, width] at positions i32[batch, n] -> [batch * n, width]."""
    batch, length, width = x.shape
    flat = (jnp.arange(batch)[:, None] * length + positions).reshape(-1)
    return jnp.take(x.reshape(-1, width), flat, axis=0, mode="clip")
