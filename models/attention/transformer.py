"""The layer of encoders and decoders (Vaswani et al. 2017, section 3.1), post-norm as there or pre-norm (Radford et
al. 2019)."""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
from jax import Array

from models.attention.mask import Mask
from models.attention.patterns.blocks import Blocks
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.self_attention import SelfAttention
from models.blocks.feed_forward import FeedForward
from models.blocks.layer import LayerSizes
from models.blocks.stack import stack
from models.core.parameters import Noise
from models.core.program import Program


class TransformerLayer(nn.Module):
    """x [batch, length, width] -> the same, or at slots i32[batch, n] alone; as `stack` calls it.

    own: the blocks of the layer's sparse pattern, which the mask then has; None where it is dense.
    pre_norm: whether the norms stand before the blocks; then the sum that leaves the last layer has none yet.
    own_globals: as of `SelfAttention`.
    """

    sizes: LayerSizes
    program: Program
    pre_norm: bool = False
    own_globals: bool = False

    def setup(self):
        self.attention = SelfAttention(self.sizes, self.program, self.pre_norm, self.own_globals)
        self.feed_forward = FeedForward(self.sizes, self.program.compute, pre_norm=self.pre_norm)

    def __call__(
        self, x: Array, mask: Mask, noise: Noise, own: Blocks | None = None, slots: Array | None = None
    ) -> tuple[Array, None]:
        mask = mask if own is None else dataclasses.replace(mask, blocks=own)
        axis = "length" if slots is None else None
        return self.feed_forward(self.attention(x, mask, noise, slots), noise, axis), None


class CachedTransformerLayer(TransformerLayer):
    """The same with a cache: shared is the mask and how many places are filled, own is the layer's, as `cache.mix`
    takes them -> (x, own with the keys and values of x)."""

    def __call__(self, x: Array, shared: tuple[Mask, Array], noise: None, own: tuple[Array, Array], slots: None = None):
        x, new = self.attention.extend(x, *shared, own)
        return self.feed_forward(x, noise, None), new


def encode(
    parent: nn.Module,
    sizes: LayerSizes,
    depth: int,
    pattern: Pattern,
    x: Array,
    mask: Mask,
    noise: Noise,
    program: Program,
    slots: Array | None = None,
    groups: Mapping[str, int] | None = None,
    own_globals: bool = False,
) -> Array:
    """x [batch, length, width] through a stack of these layers -> the same, or at slots i32[batch, n] alone.

    groups: as of `stack`, for layers that share parameters.   own_globals: as of `SelfAttention`.
    """
    layer = TransformerLayer(sizes, program, own_globals=own_globals, parent=None)
    blocks = blocks_of(pattern, depth, sizes.heads, x.shape[1], mask.causal)
    return stack(parent, [layer], depth, x, mask, noise, program, slots, blocks, groups)[0]
