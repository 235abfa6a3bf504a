"""Multi-head self-attention with its weights."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
from jax import Array

from models.attention import cache, plain, sparse
from models.attention.global_tokens import GlobalTokens
from models.attention.kernels.kernel import Attention
from models.attention.kernels.table import require
from models.attention.mask import Mask, chosen
from models.attention.operands import SelfWeights
from models.attention.patterns.blocks import Blocks
from models.blocks.dense import Weights
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.positions import gather_positions
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import PLAIN, Program
from models.core.sharding import constrain


class SelfAttention(nn.Module):
    """With its residual: x, mask -> norm(x + dropout(attend(x))), or pre-norm x + dropout(attend(norm(x))).

    With slots i32[batch, n], queries at those positions alone: [batch, length, width] -> [batch, n, width].
    own_globals: whether what global tokens see has projections of its own, see `GlobalTokens`.
    """

    sizes: LayerSizes
    program: Program
    pre_norm: bool = False
    own_globals: bool = False

    def setup(self):
        sizes = self.sizes
        for name in SelfWeights._fields:
            std = sizes.output_std if name == "output" else None
            setattr(self, name, Weights(sizes.width, std or sizes.init_std))
        self.norm = Norm(sizes.norm_epsilon, self.program.compute)
        if self.own_globals:
            setattr(self, "global", GlobalTokens(sizes, self.program))  # noqa: B010 (a keyword)

    def _weights(self, inputs: int) -> SelfWeights:
        return SelfWeights(*(getattr(self, name)(inputs) for name in SelfWeights._fields))

    def extend(
        self, x: Array, mask: Mask, filled: Array, own: tuple[Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        """Of tokens after those of a cache, see `cache.attend` -> (like x, the cache with them)."""
        given, x = x, self.norm(x) if self.pre_norm else x
        y, new = cache.attend(x, self._weights(x.shape[-1]), mask, filled, self.sizes, self.program, own)
        return constrain(given + y if self.pre_norm else self.norm(given + y), "batch", None, None), new

    def __call__(self, x: Array, mask: Mask, noise: Noise, slots: Array | None = None) -> Array:
        sizes, program, norm, weights = self.sizes, self.program, self.norm, self._weights(x.shape[-1])
        given, x = x, norm(x) if self.pre_norm else x
        read = x if slots is None else gather_positions(x, slots)
        if slots is not None and mask.blocks is None:  # too few queries for a kernel's blocks
            of_slots = chosen(mask, slots)
            y = plain.attend(x, weights, of_slots, sizes, program, noise, read)
        else:
            at = {} if slots is None else {"slots": slots}
            attend = functools.partial(plain.attend, mix=plain_form(program.attention, mask))
            if program.attention not in PLAIN:
                asked = attention_of(sizes, x.shape[1], mask.causal, mask.ranks is not None, mask.blocks)
                attend = require(program.attention, "self", asked).attend
            apart = dataclasses.replace(mask, globals_apart=self.own_globals)
            y = attend(x, weights, apart, sizes, program, noise, **at)
        if self.own_globals:
            y = getattr(self, "global")(x, y, mask, weights.output, site(noise, 4), slots)
        if self.pre_norm:
            read = given if slots is None else gather_positions(given, slots)
        y = read + dropout(y, sizes.dropout, site(noise, 2))
        axis = mask.axis if slots is None else None
        return constrain(y if self.pre_norm else norm(y), "batch", axis, None)


def plain_form(named: str, mask: Mask) -> Callable[..., Array]:
    """The plain operations that a program's attention names for a mask: `plain.attention` or the same in blocks."""
    if mask.blocks is None or named == "dense":
        return plain.attention
    wins = mask.segments.shape[1] > sparse.crossover(mask.blocks)
    return sparse.attention if named == "blocked" or wins else plain.attention


def attention_of(
    sizes: LayerSizes,
    length: int,
    causal: bool = False,
    ranked: bool = False,
    blocks: Blocks | None = None,
    part: str = "",
) -> Attention:
    """What a layer's attention asks of a kernel."""
    of_layer = (length, sizes.width, sizes.heads, sizes.attention_dropout)
    if blocks is not None:
        of_heads = lambda array: None if array is None else array.shape[-1:]
        reach, dilation = of_heads(blocks.reach), of_heads(blocks.dilation)
        blocks = dataclasses.replace(blocks, drawn=blocks.drawn.shape[-3:], reach=reach, dilation=dilation)
    return Attention(*of_layer, causal=causal, ranked=ranked, blocks=blocks, part=part)
