"""Attention in plain operations, which run everywhere."""

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.mask import PAIRS, Mask, only_of_seen, times, visible
from models.attention.operands import SelfWeights
from models.blocks.dense import affine
from models.blocks.layer import LayerSizes
from models.blocks.positions import gather_positions, put_in_rows
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import Program, kept
from models.core.sharding import constrain, current_rules


def attention(q: Array, k: Array, v: Array, mask: Mask, *, dropout_rate: float, noise: Noise) -> Array:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1) -> [batch, queries, heads, head_dim].

    q: [batch, queries, heads, head_dim], k, v: [batch, length, heads, head_dim], any float dtype; softmax in float32.
    dropout_rate: on the probabilities, drawn from `noise` (u32[batch, 2] or None).
    """
    q = constrain(q, "batch", mask.axis, "heads", None)
    # Each device's queries see all keys of their rows: with a cut length, that gathers keys and values.
    k, v = (constrain(x, "batch", None, "heads", None) for x in (k, v))
    seen = visible(mask)
    scale = q.shape[-1] ** -0.5
    with jax.named_scope(PAIRS):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * scale, k, preferred_element_type=jnp.float32)
    if mask.blocks is not None:  # a key that is seen twice has twice the share
        scores += jnp.log(jnp.maximum(times(mask), 1).astype(jnp.float32))
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    probabilities = dropout(probabilities, dropout_rate, noise)
    with jax.named_scope(PAIRS):
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)
    if mask.blind:
        mixed = only_of_seen(mixed, seen)
    return constrain(mixed, "batch", mask.axis, "heads", None)


def attend(
    x: Array,
    weights: SelfWeights,
    mask: Mask,
    sizes: LayerSizes,
    program: Program,
    noise: Noise,
    read: Array | None = None,
    slots: Array | None = None,
    mix=attention,
) -> Array:
    """A layer's self-attention: x [batch, length, width] -> the output's projection of the mixed values, like `read`.

    read: [batch, n, width] where the queries are other than x, as the mask's are; mask: see `Mask`.
    slots: i32[batch, n], the queries that alone are projected, and their output: of a sparse pattern, which mixes all.
    mix: called as `attention`, for kernels that want heads beside each other in [..., heads, head_dim].
    """
    read = x if read is None else read

    def project(name: str, y: Array) -> Array:
        with jax.named_scope(name):
            projected = affine(y, getattr(weights, name), program.compute)
        return kept(projected.reshape(*y.shape[:2], sizes.heads, -1))

    if slots is None or current_rules() is not None:
        q = project("query", read)
    else:  # nobody reads what the others mix
        q = put_in_rows(project("query", gather_positions(read, slots)), slots, read.shape[1])
    k, v = project("key", x), project("value", x)
    mixed = mix(q, k, v, mask, dropout_rate=sizes.attention_dropout, noise=site(noise, 1))
    mixed = kept(mixed.reshape(read.shape))
    with jax.named_scope("output"):
        return affine(mixed if slots is None else gather_positions(mixed, slots), weights.output, program.compute)
