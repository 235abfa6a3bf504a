"""Attention of whole rows as one TPU kernel, from the products of the projections to the mixed values.

Splash attention walks over blocks of long rows, wants heads apart, and writes its statistics 128 times over. A row of
up to 512 tokens needs none of that: its scores fit into vector memory, and a block of 128 lanes holds whole heads as
the projections write them. Scores lie here as [keys, queries]: the softmax then reduces over sublanes, its statistics
are single rows, and products with values and gradients fill the matrix units, [head_dim, keys] @ [keys, queries].
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.attention.kernels.kernel import LANES, Attention, at_share, cuts
from models.attention.kernels.lanes import across, along, only
from models.attention.mask import Mask
from models.attention.operands import SelfWeights
from models.blocks.dense import affine
from models.blocks.layer import LayerSizes
from models.blocks.products import product
from models.core.parameters import Noise
from models.core.program import Program, kept
from models.core.sharding import current_rules

LONGEST = 512  # tokens; the scores of a head are then 1 MiB
_HIDDEN = float(jnp.finfo(jnp.float32).min)


# Shares of the peak with heads of 64 in rows of 512, from the instruction bundles that XLA:TPU scheduled for a turn of
# the kernel's loop, one a cycle (LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true"): what a kernel
# waits for is not in them; its transfers take a third of the HBM's time. On v5p a turn, two heads, is 2630 bundles
# forward and 4203 backward.
COSTS = {
    "row_attention_forward": at_share({"v4": 0.25, "v5e": 0.39, "v5p": 0.39, "v6e": 0.12}),
    "row_attention_backward": at_share({"v4": 0.45, "v5e": 0.62, "v5p": 0.61, "v6e": 0.20}),
}


def fits(attention: Attention) -> bool:
    """Whether rows within segments, as a mesh cuts them, fill whole lanes with their heads and fit into memory."""
    (length, width, heads), (cut, shared) = attention[:3], cuts(attention)
    whole = length % LANES == 0 and width // shared % LANES == 0 and LANES % (width // heads) == 0
    return whole and length <= LONGEST and cut == 1 and not attention.causal


def attend(
    x: Array, weights: SelfWeights, mask: Mask, sizes: LayerSizes, program: Program, noise: Noise,
    interpret: bool = False,
) -> Array:  # fmt: skip
    """`plain.attend` by the kernel, for what `fits`."""
    kernels, biases = zip(*weights[:3], strict=True)
    # One product for all three. Without the barrier XLA:TPU transposes activations to take its gradient apart.
    products = kept(product(x, jax.lax.optimization_barrier(interleaved(*kernels))))
    mixed = attend_rows(products, interleaved(*biases), mask.segments, sizes.heads, interpret)
    with jax.named_scope("output"):
        return affine(mixed, weights.output, program.compute)


def attend_rows(products: Array, biases: Array, segments: Array, heads: int, interpret: bool = False) -> Array:
    """`row_attention` on a mesh: each device attends with its rows and heads."""
    head_dim = products.shape[-1] // 3 // heads

    def attend(products: Array, biases: Array, segments: Array) -> Array:
        return row_attention(products, biases, segments, head_dim, interpret)

    rules = current_rules()
    if rules is not None:
        spec = lambda x, *axes: rules.spec(axes, x.shape)
        specs = (spec(products, "batch", None, "heads"), spec(biases, "heads"), spec(segments, "batch", None))
        attend = jax.shard_map(attend, mesh=rules.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return attend(products, biases, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def row_attention(products: Array, biases: Array, segments: Array, head_dim: int, interpret: bool = False) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v within segments -> [batch, length, width], heads side by side.

    products: [batch, length, 3 * width], x @ the `interleaved` kernels of q, k and v.
    biases: f32[3 * width], interleaved, still to be added.   segments: i32[batch, length].
    Sizes: see `fits`.   interpret: run as plain operations, on any platform.
    """
    return _forward(products, biases, segments, head_dim, interpret)[0]


def interleaved(q: Array, k: Array, v: Array) -> Array:
    """Three [..., width] -> [..., 3 * width], 128 columns of each in turns."""
    blocks = [x.reshape(*x.shape[:-1], -1, LANES) for x in (q, k, v)]
    return jnp.stack(blocks, -2).reshape(*q.shape[:-1], -1)


def _forward(products, biases, segments, head_dim, interpret):
    batch, length, tripled = products.shape
    out = jax.ShapeDtypeStruct((batch, length, tripled // 3), products.dtype)
    spread = jax.ShapeDtypeStruct((batch, tripled // 3 // LANES, LANES // head_dim, length), jnp.float32)
    inputs = (segments[:, None], biases[None], products)
    out, spread = _call(_forward_kernel, "forward", 2, head_dim, interpret, inputs, (out, spread))
    out, spread = kept(out), kept(spread)
    return out, (products, biases, segments, out, spread)


def _backward(head_dim, interpret, residuals, g):
    products, biases, segments, out, spread = residuals
    sums = jax.ShapeDtypeStruct((products.shape[0], 1, biases.shape[0]), jnp.float32)
    inputs = (segments[:, None], biases[None], products, out, g, spread)
    # Scores again, then the gradients of values, probabilities, queries and keys.
    d_products, sums = _call(_backward_kernel, "backward", 5, head_dim, interpret, inputs, (products, sums))
    return d_products, sums.sum((0, 1)), None


row_attention.defvjp(_forward, _backward)


def _call(kernel, name, times, head_dim, interpret, inputs, results):
    """The kernel for each row and each 128 lanes of its heads.   times: products of queries and keys in it."""
    segments, biases, products = inputs[:3]
    batch, length, tripled = products.shape
    blocks = tripled // 3 // LANES

    def spec(a) -> pl.BlockSpec:
        if a is segments:
            return pl.BlockSpec((None, *a.shape[1:]), lambda row, block: (row, 0, 0))
        if a is biases:
            return pl.BlockSpec((1, 3 * LANES), lambda row, block: (0, block))
        if a.ndim == 4:  # statistics
            return pl.BlockSpec((None, None, *a.shape[2:]), lambda row, block: (row, block, 0, 0))
        return pl.BlockSpec((None, a.shape[1], a.shape[2] // blocks), lambda row, block: (row, 0, block))

    return pl.pallas_call(
        functools.partial(kernel, head_dim=head_dim),
        grid=(batch, blocks),
        in_specs=[spec(a) for a in inputs],
        out_specs=[spec(a) for a in results],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * times * batch * length**2 * tripled // 3,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*inputs, *results)),
            transcendentals=batch * length**2 * (tripled // 3 // head_dim),
        ),
        name=f"row_attention_{name}",
        interpret=interpret,
    )(*inputs)


def _forward_kernel(segments, biases, products, out, spread, *, head_dim):
    visible = _visible(segments)
    q, k, v = _projected(products, biases, head_dim)
    vt, mixed = v.T, []
    for head in range(LANES // head_dim):
        scores = jnp.where(visible, across(k, only(q, head, head_dim)), _HIDDEN)  # [keys, queries]
        most = scores.max(0, keepdims=True)
        p = jnp.exp(scores - most)
        total = p.sum(0, keepdims=True)
        mixed.append(along(_rows(vt, head, head_dim), p.astype(v.dtype)) / total)  # [head_dim, queries]
        spread[head : head + 1, :] = most + jnp.log(total)
    out[...] = jnp.concatenate(mixed).T.astype(out.dtype)


def _backward_kernel(segments, biases, products, out, g, spread, d_products, d_biases, *, head_dim):
    visible = _visible(segments)
    q, k, v = _projected(products, biases, head_dim)
    g = g[...]
    qt, kt, gt = q.T, k.T, g.T
    weighted = (g.astype(jnp.float32) * out[...].astype(jnp.float32)).T  # [lanes, queries]
    parts = [], [], []
    for head in range(LANES // head_dim):
        scores = jnp.where(visible, across(k, only(q, head, head_dim)), _HIDDEN)
        p = jnp.exp(scores - spread[head : head + 1, :])
        dp = across(v, only(g, head, head_dim))
        ds = (p * (dp - _rows(weighted, head, head_dim).sum(0, keepdims=True))).astype(g.dtype)
        parts[0].append(along(_rows(kt, head, head_dim), ds) * head_dim**-0.5)  # [head_dim, queries]
        parts[1].append(across(_rows(qt, head, head_dim), ds))  # [head_dim, keys]
        parts[2].append(across(_rows(gt, head, head_dim), p.astype(g.dtype)))
    for index, part in enumerate(parts):
        gradient = jnp.concatenate(part).T
        own = slice(index * LANES, (index + 1) * LANES)
        d_products[:, own] = gradient.astype(d_products.dtype)
        d_biases[:, own] = gradient.sum(0, keepdims=True)


def _projected(products, biases, head_dim):
    """q, scaled, k and v, each [length, lanes]."""
    sums = products[...].astype(jnp.float32) + biases[...]
    q, k, v = (sums[:, index * LANES : (index + 1) * LANES] for index in range(3))
    return [x.astype(products.dtype) for x in (q * head_dim**-0.5, k, v)]


def _visible(segments) -> Array:
    """bool[keys, queries]"""
    length = segments.shape[1]
    keys = jnp.broadcast_to(segments[...], (LANES, length)).T
    return jnp.tile(keys, (1, length // LANES)) == segments[...]


def _rows(x: Array, head: int, head_dim: int) -> Array:
    return x[head * head_dim : (head + 1) * head_dim]
