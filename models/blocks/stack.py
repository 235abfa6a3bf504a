"""The stack of layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.core.noise import fold
from models.core.parameters import LAYERS, Noise
from models.core.program import KEPT, Program


def stack(
    parent: nn.Module,
    layer: nn.Module,
    depth: int,
    x,
    shared,
    noise: Noise,
    program: Program,
    slots: Array | None = None,
    each=None,
):
    """Apply `depth` layers of equal shape to x, [batch, length, width] or a pytree of arrays like it -> the last's x.

    The parameters are always stored stacked under 'layers' [depth, ...], whether the program scans or unrolls.
    layer: an unbound module, called as layer(x, shared, noise) -> x.   shared: what all layers get, like a Mask.
    slots: i32[batch, n], positions at which alone the last layer's output is read; that layer is then called as
    layer(x, shared, noise, slots) -> [batch, n, width].
    each: arrays [depth, ...] of which each layer gets its slice, like a memory; it is then called as
    layer(x, shared, noise, slice) -> (x, output), and the result is (x, the outputs stacked [depth, ...]).
    """
    each = () if each is None else (each,)

    def init(key: Array) -> dict:
        own = jax.tree.map(lambda array: array[0], each)
        one = lambda k: layer.init(k, x, shared, None, *own)["params"]
        return jax.vmap(one)(jax.random.split(key, depth))

    def apply(x, of_layer, *slots: Array):
        params, index, own = of_layer
        own_noise = None if noise is None else fold(noise, index)
        result = layer.apply({"params": params}, x, shared, own_noise, *own, *slots)
        return result if own else (result, None)

    if program.remat != "none":
        policy = _is_kept if program.remat == "dots" else None
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=program.depth == "unroll")

    inputs = (parent.param(LAYERS, init), jnp.arange(depth), each)
    whole = depth if slots is None else depth - 1  # layers that compute every position
    if program.depth == "scan":
        x, outputs = jax.lax.scan(apply, x, jax.tree.map(lambda array: array[:whole], inputs))
        if slots is not None:
            x, output = apply(x, jax.tree.map(lambda array: array[-1], inputs), slots)
            outputs = jax.tree.map(lambda before, last: jnp.concatenate([before, last[None]]), outputs, output)
    else:
        arrays, structure = jax.tree.flatten(inputs)
        outputs = []
        for index, of_layer in enumerate(zip(*map(jnp.unstack, arrays), strict=True)):  # w[i] per layer copies more
            x, output = apply(x, structure.unflatten(of_layer), *(() if index < whole else (slots,)))
            outputs.append(output)
        outputs = jax.tree.map(lambda *slices: jnp.stack(slices), *outputs)
    return (x, outputs) if each else x


def _is_kept(primitive, *avals, **parameters) -> bool:
    """The policy of remat 'dots'. JAX would keep a kernel in the recomputation although nothing there reads it."""
    return primitive.name == "pallas_call" or primitive.name == "name" and parameters["name"] == KEPT
