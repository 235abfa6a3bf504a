"""Multi-head self-attention with its weights."""

import flax.linen as nn
import jax
from jax import Array

from models.attention.kernels.row_attention import interleaved
from models.attention.kernels.splash import splash
from models.attention.kernels.table import Attention, attend_rows, require, rows_fit
from models.attention.mask import Mask, chosen
from models.attention.plain import attention
from models.blocks.dense import Dense, FromHeads, ToHeads, Weights
from models.blocks.heads import gather_positions
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.products import product
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import Program, kept
from models.core.sharding import constrain


class SelfAttention(nn.Module):
    """Post-norm, with its residual: x, mask -> norm(x + dropout(attend(x))).

    With slots i32[batch, n], queries at those positions alone: [batch, length, width] -> [batch, n, width].
    """

    sizes: LayerSizes
    program: Program

    @nn.compact
    def __call__(self, x: Array, mask: Mask, noise: Noise, slots: Array | None = None) -> Array:
        sizes, dtype, kind = self.sizes, self.program.compute, self.program.attention
        if slots is None:
            read, axis = x, "length"
            if kind != "xla":
                require(kind, attention_of(sizes, x.shape[1], mask.causal, mask.ranks is not None))
            y = self.by_kernel(x, mask) if kind == "splash" else self.by_heads(x, x, mask, noise, kind)
        else:  # too few queries for a kernel's blocks
            read, axis = gather_positions(x, slots), None
            y = self.by_heads(read, x, chosen(mask, slots), noise, "xla")
        y = Norm(sizes.norm_epsilon, dtype, name="norm")(read + dropout(y, sizes.dropout, site(noise, 2)))
        return constrain(y, "batch", axis, None)

    def by_heads(self, read: Array, x: Array, mask: Mask, noise: Noise, kind: str) -> Array:
        """Queries of read [batch, n, width] to all of x; heads beside each other in [.., heads, head_dim]."""
        sizes, width = self.sizes, x.shape[-1]
        dense = lambda name: Dense(width, sizes.init_std, self.program.compute, name=name)
        split = lambda y: y.reshape(*y.shape[:2], sizes.heads, width // sizes.heads)
        q, k, v = (kept(split(dense(name)(y))) for name, y in (("query", read), ("key", x), ("value", x)))
        mixed = attention(q, k, v, mask, dropout_rate=sizes.attention_dropout, noise=site(noise, 1), kind=kind)
        return dense("output")(kept(mixed.reshape(read.shape)))

    def by_kernel(self, x: Array, mask: Mask) -> Array:
        """By the TPU's kernels."""
        heads, (_, length, width) = self.sizes.heads, x.shape
        of_dense = (width, self.sizes.init_std, self.program.compute)
        names = ("query", "key", "value")
        if not rows_fit(attention_of(self.sizes, length, mask.causal)):  # [batch, heads, length, head_dim]
            q, k, v = (kept(ToHeads(*of_dense, heads=heads, name=name)(x)) for name in names)
            return FromHeads(*of_dense, name="output")(splash(q, k, v, mask))
        matrices, biases = zip(*(Weights(*of_dense, name=name)(width) for name in names), strict=True)
        # One product for all three. Without the barrier XLA:TPU transposes activations to take its gradient apart.
        products = kept(product(x, jax.lax.optimization_barrier(interleaved(*matrices))))
        return Dense(*of_dense, name="output")(attend_rows(products, interleaved(*biases), mask.segments, heads))


def attention_of(
    sizes: LayerSizes, length: int, causal: bool = False, ranked: bool = False, part: str = ""
) -> Attention:
    """What a layer's attention asks of a kernel."""
    of_layer = (length, sizes.width, sizes.heads, sizes.attention_dropout)
    return Attention(*of_layer, causal=causal, ranked=ranked, part=part)
