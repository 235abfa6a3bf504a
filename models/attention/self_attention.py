"""Multi-head self-attention with its weights."""

import flax.linen as nn
from jax import Array

from models.attention import plain
from models.attention.kernels.kernel import Attention
from models.attention.kernels.table import require
from models.attention.mask import Mask, chosen
from models.attention.operands import SelfWeights
from models.blocks.dense import Weights
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.positions import gather_positions
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import Program
from models.core.sharding import constrain


class SelfAttention(nn.Module):
    """With its residual: x, mask -> norm(x + dropout(attend(x))), or pre-norm x + dropout(attend(norm(x))).

    With slots i32[batch, n], queries at those positions alone: [batch, length, width] -> [batch, n, width].
    """

    sizes: LayerSizes
    program: Program
    pre_norm: bool = False

    @nn.compact
    def __call__(self, x: Array, mask: Mask, noise: Noise, slots: Array | None = None) -> Array:
        sizes, program, width = self.sizes, self.program, x.shape[-1]
        weights = SelfWeights(*(Weights(width, sizes.init_std, name=name)(width) for name in SelfWeights._fields))
        norm = Norm(sizes.norm_epsilon, program.compute, name="norm")
        given, x = x, norm(x) if self.pre_norm else x
        if slots is None:
            read, attend = x, plain.attend
            if program.attention != "xla":
                asked = attention_of(sizes, x.shape[1], mask.causal, mask.ranks is not None)
                attend = require(program.attention, "self", asked).attend
            y = attend(x, weights, mask, sizes, program, noise)
        elif mask.blocks is not None:
            read = gather_positions(x, slots)
            y = plain.attend(x, weights, mask, sizes, program, noise, slots=slots)
        else:  # too few queries for a kernel's blocks
            read, mask = gather_positions(x, slots), chosen(mask, slots)
            y = plain.attend(x, weights, mask, sizes, program, noise, read)
        if self.pre_norm:
            read = given if slots is None else gather_positions(given, slots)
        y = read + dropout(y, sizes.dropout, site(noise, 2))
        axis = mask.axis if slots is None else None
        return constrain(y if self.pre_norm else norm(y), "batch", axis, None)


def attention_of(
    sizes: LayerSizes, length: int, causal: bool = False, ranked: bool = False, part: str = ""
) -> Attention:
    """What a layer's attention asks of a kernel."""
    of_layer = (length, sizes.width, sizes.heads, sizes.attention_dropout)
    return Attention(*of_layer, causal=causal, ranked=ranked, part=part)
