"""The Transformer layer of encoders and decoders (Vaswani et al. 2017, section 3.1), post-norm as there or pre-norm
(Radford et al. 2019)."""

import dataclasses

import flax.linen as nn
from jax import Array

from models.attention.cache import KeysValues
from models.attention.mask import Mask
from models.attention.multi_head import MultiHeadAttention
from models.attention.patterns.blocks import Blocks
from models.attention.patterns.pattern import blocks_of
from models.blocks.dense import Dense
from models.blocks.feed_forward import FeedForward
from models.blocks.layer import LayerSizes, layer_sizes
from models.blocks.stack import stack
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import Program


class TransformerLayer(nn.Module):
    """A layer as `stack` calls it: x [batch, length, width] -> the same shape, or only the positions `slots` i32[batch,
    n].

    state: the blocks of the layer's sparse pattern, which are put into the mask; None for full attention.
    pre_norm: whether the norms stand before the blocks; the output of the last layer then still needs a norm.
    global_projections: as in `MultiHeadAttention`.
    """

    sizes: LayerSizes
    program: Program
    pre_norm: bool = False
    global_projections: bool = False

    def setup(self):
        self.attention = MultiHeadAttention(self.sizes, self.program, self.pre_norm, self.global_projections)
        self.feed_forward = FeedForward(self.sizes, self.program.compute, pre_norm=self.pre_norm)

    def __call__(
        self, x: Array, mask: Mask, noise: Noise, state: Blocks | None = None, slots: Array | None = None
    ) -> tuple[Array, None]:
        mask = mask if state is None else dataclasses.replace(mask, blocks=state)
        axis = "length" if slots is None else None
        return self.feed_forward(self.attention(x, mask, noise, slots), noise, axis), None


class CachedTransformerLayer(TransformerLayer):
    """A `TransformerLayer` with a cache -> (x, the state with the keys and values of x).
    shared: (the mask, the number of filled places).   state: the layer's cached keys and values; see `cache.mix`."""

    def __call__(self, x: Array, shared: tuple[Mask, Array], noise: None, state: KeysValues, slots: None = None):
        x, new = self.attention.extend(x, *shared, state)
        return self.feed_forward(x, noise, None), new


def encode(
    parent: nn.Module,
    config,
    embedded: Array,
    mask: Mask,
    noise: Noise,
    program: Program,
    slots: Array | None = None,
    layer: nn.Module | None = None,
) -> Array:
    """Run embedded f32[batch, length, embedding] through an encoder's layers -> [batch, length, width], or only the
    positions `slots` i32[batch, n].

    config: an `EncoderConfig`.   layer: unbound, by default a `TransformerLayer`.
    """
    sizes, depth = layer_sizes(config), config.depth
    x = dropout(embedded, sizes.dropout, site(noise, 0)).astype(program.compute)
    if config.projects:
        x = Dense(sizes.width, sizes.init_std, program.compute, parent=parent, name="project")(x)
    layer = layer or TransformerLayer(sizes, program, global_projections=config.global_projections, parent=None)
    blocks, noise = blocks_of(config.pattern, depth, sizes.heads, x.shape[1], mask.causal), site(noise, 1)
    return stack(parent, [layer], depth, x, mask, noise, program, slots, blocks, config.shared_blocks, config.groups)[0]
