"""Attention with relative positions and a memory (Dai et al. 2019, arXiv:1901.02860, section 3), and the attention
block that Transformer-XL and XLNet share."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.distances import shift
from models.attention.kernels.kernel import Attention
from models.attention.kernels.table import require
from models.attention.mask import Mask, only_of_seen, visible
from models.attention.operands import Biases, Context, Types
from models.blocks.dense import Dense
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.products import contraction, shared_product
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import PLAIN, Program, kept
from models.core.sharding import constrain


def sinusoids(first: int, last: int, width: int) -> np.ndarray:
    """Return encodings, sines then cosines, of the distances first, ..., last: f32[first - last + 1, width]."""
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(first, last - 1, -1)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


def shift_to(starts: Array, scores: Array, keys: int) -> Array:
    """Do the same as `shift` for chosen queries: scores [batch, heads, n, distances] -> [batch, heads, n, keys].
    starts: i32[batch, n], the index of each query's first key among the distances. This is a gather; shifting by powers
    of two, which needs none, took 2 to 9 times as long on a CPU."""
    numbers = starts[:, None, :, None] + jnp.arange(keys)
    return jnp.take_along_axis(scores, numbers, axis=-1, mode="clip")


def relative_attention(
    q: Array,
    context: Context,
    biases: Biases,
    mask: Mask,
    types: Types | None,
    heads: int,
    *,
    dropout_rate: float,
    noise: Noise,
) -> Array:
    """Compute attention by content and by distance (Dai et al. 2019, section 3.3, terms a to d) -> like q.

    q: [batch, n, width], heads side by side, any float dtype; softmax in float32.
    types: None if scores have no term by type; `biases` then has none either.
    dropout_rate: on the probabilities, drawn from `noise` (u32[batch, 2] or None).
    """
    split = lambda x: x.reshape(*x.shape[:-1], heads, -1)
    (k, v, r), axis, scale = map(split, context), mask.axis, split(q).shape[-1] ** -0.5

    # In float32, so that the gradients of the biases, which are sums over all rows, are float32, too.
    def added(bias):
        return ((split(q).astype(jnp.float32) + split(bias)) * scale).astype(q.dtype)

    add = lambda bias: constrain(added(bias), "batch", axis, "heads", None)
    # Each device's queries see all keys of their rows; if the mesh cuts rows, this gathers keys and values.
    k, v = (constrain(x, "batch", None, "heads", None) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", add(biases.content), k, preferred_element_type=jnp.float32)
    distances = shared_product("bqhd,brhd->bhqr", add(biases.position), r)
    number = k.shape[1]
    scores += shift(distances, number) if mask.after is None else shift_to(mask.after, distances, number)
    if types is not None:
        other = types.queries[:, None, :, None] != types.keys[:, None, None, :]
        same, different = jnp.moveaxis(contraction("bqhd,thd->bhqt", add(biases.type), split(biases.types)), -1, 0)
        scores += jnp.where(other, different[..., None], same[..., None])
    seen = visible(mask)
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    probabilities = dropout(probabilities, dropout_rate, noise)
    mixed = only_of_seen(jnp.einsum("bhqk,bkhd->bqhd", probabilities, v), seen)
    return constrain(mixed, "batch", axis, "heads", None).reshape(q.shape)


class RelativeAttention(nn.Module):
    """Multi-head relative attention with its residual and norm."""

    sizes: LayerSizes
    program: Program

    def setup(self):
        sizes, dtype = self.sizes, self.program.compute
        project = lambda: Dense(sizes.width, sizes.init_std, dtype, bias=False)
        self.query, self.key, self.value, self.position, self.output = (project() for _ in range(5))
        self.norm = Norm(sizes.norm_epsilon, dtype)

    def context(self, hidden: Array, table: Array) -> Context:
        """Project hidden [batch, memory + length, width] and a table of distances [batch or 1, distances, width]."""
        return Context(*map(kept, (self.key(hidden), self.value(hidden), self.position(table))))

    def __call__(
        self, x: Array, context: Context, biases: Biases, mask: Mask, noise: Noise, types: Types | None = None
    ) -> Array:
        """Return norm(x + dropout(output(attend(x)))) for x [batch, n, width]; see `relative_attention`."""
        sizes = self.sizes
        sizes.check_usual("relative attention")
        if mask.biased:
            raise ValueError("relative attention has its own biases of the scores: leave the mask's bias out")
        q, rate = kept(self.query(x)), sizes.attention_dropout
        attend = relative_attention
        if self.program.attention not in PLAIN:
            spec = attention_spec(q, context, mask, sizes.heads, rate)
            attend = require(self.program.attention, "relative", spec).mixing(spec).mix
        mixed = attend(q, context, biases, mask, types, sizes.heads, dropout_rate=rate, noise=site(noise, 1))
        y = self.output(kept(mixed))
        return constrain(self.norm(x + dropout(y, sizes.dropout, site(noise, 2))), "batch", mask.axis, None)


def attention_spec(q: Array, context: Context, mask: Mask, heads: int, dropout_rate: float) -> Attention:
    """Describe, for kernels, the attention of queries [batch, n, width] to a context."""
    (_, n, width), keys, chosen = q.shape, context.k.shape[1], mask.after is not None
    length = context.r.shape[1] - keys if chosen else n  # the distances of chosen queries cover the whole row
    return Attention(length, width, heads, dropout_rate, keys - length, chosen, mask.causal, mask.ranks is not None)
