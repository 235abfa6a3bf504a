"""The multi-head attention block with its weights."""

import dataclasses

import flax.linen as nn
import jax
from jax import Array

from models.attention import cache, parts, plain, sparse
from models.attention.global_tokens import GlobalTokens
from models.attention.kernels.kernel import Attention
from models.attention.kernels.table import require
from models.attention.layouts import HEADS_APART, Mixing
from models.attention.mask import Mask, chosen, visible
from models.attention.operands import Projections
from models.attention.patterns.blocks import Blocks
from models.attention.rotary import Turns, turns_at
from models.blocks.dense import Affine, Weights, affine
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.positions import gather_positions
from models.core.inside import PROJECTED, SHARES, recorded
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import PLAIN, Program
from models.core.sharding import constrain


class MultiHeadAttention(nn.Module):
    """Attention with its residual: norm(x + dropout(attend(x))), or pre-norm x + dropout(attend(norm(x))).

    With slots i32[batch, n], only these positions are queries: [batch, length, width] -> [batch, n, width].
    With a context [batch, keys, its own width], x attends to it instead of itself; the mask has x's queries and the
    context's keys.
    values: what values are made from, [batch, length, its own width], if not what keys are made from.
    residual: [batch, length, width], if not x, which may then have another width.
    global_projections: whether the attention of global tokens has separate projections, see `GlobalTokens`.
    normed: whether x is normalised already, so that pre-norm has no norm here.
    turns: the rotary positions of x's tokens, which projections without biases need; None without.
    Noise is drawn at the sites 1, 2 and, for global projections, 4; a layer with two of these modules must give each a
    different noise.
    """

    sizes: LayerSizes
    program: Program
    pre_norm: bool = False
    global_projections: bool = False
    normed: bool = False

    def setup(self):
        sizes = self.sizes
        # Without the usual scale, smaller initial weights give scores of the usual size.
        begin = None if sizes.scale is None else 1 / self._factor()
        self.query = Weights(sizes.heads_width, sizes.init_std, sizes.biases, begin)
        for name in ("key", "value"):
            setattr(self, name, Weights(sizes.heads_width, sizes.init_std, sizes.biases))
        self.output = Weights(sizes.width, sizes.output_std or sizes.init_std, sizes.biases)
        norm = Norm(sizes.norm_epsilon, self.program.compute, sizes.norm) if not self.normed else None
        self.norm = norm or (lambda x: x)
        if self.global_projections:
            setattr(self, "global", GlobalTokens(sizes, self.program))  # noqa: B010 (a keyword)

    def _factor(self) -> float:
        """The factor of queries that turns the usual scale, which every implementation applies, into `sizes.scale`."""
        return self.sizes.scale * (self.sizes.heads_width // self.sizes.heads) ** 0.5

    def _query(self, width: int) -> Affine:
        query = self.query(width)
        return query if self.sizes.scale is None else jax.tree.map(lambda array: array * self._factor(), query)

    def _weights(self, width: int, of_keys: int | None = None, of_values: int | None = None) -> Projections:
        """width, of_keys, of_values: of what queries, keys and values are made from, if they differ."""
        key, value = self.key(of_keys or width), self.value(of_values or of_keys or width)
        return Projections(self._query(width), key, value, self.output(self.sizes.heads_width))

    def remembered(self, context: Array) -> tuple[Array, Array]:
        """Return the keys and values of a second sequence [batch, keys, width], for `recall`."""
        dtype, heads = self.program.compute, self.sizes.heads
        projected = (affine(context, weights(context.shape[-1]), dtype) for weights in (self.key, self.value))
        return tuple(cache.heads_first(x.reshape(*x.shape[:2], heads, -1)) for x in projected)

    def recall(self, x: Array, mask: Mask, state: tuple[Array, Array]) -> Array:
        """Attend from x to a second sequence by its `remembered` keys and values -> like x.

        Adjacent rows of x may share a second sequence; `mask.queries` then has the queries of all of them in one row.
        """
        residual, x = x, self.norm(x) if self.pre_norm else x
        dtype, sizes = self.program.compute, self.sizes
        q = affine(x, self._query(x.shape[-1]), dtype).reshape(*mask.queries.shape, sizes.heads, -1)
        mixed = cache.recall(q, *state, mask).reshape(*x.shape[:2], sizes.heads, -1)
        y = residual + HEADS_APART.output(mixed, self.output(sizes.heads_width), dtype)
        return constrain(y if self.pre_norm else self.norm(y), "batch", None, None)

    def extend(
        self, x: Array, mask: Mask, filled: Array, state: cache.KeysValues, turns: Turns | None = None
    ) -> tuple[Array, cache.KeysValues]:
        """Attend from tokens that follow the cached ones, see `cache.mix` -> (like x, the cache with them)."""
        residual, x = x, self.norm(x) if self.pre_norm else x
        weights, dtype = self._weights(x.shape[-1]), self.program.compute
        operands = HEADS_APART.operands(x, x, weights, self.sizes.heads, dtype)
        operands = operands if turns is None else HEADS_APART.turn(operands, turns, turns)
        mixed, new = cache.mix(*operands, mask, filled, state)
        y = residual + HEADS_APART.output(mixed, weights.output, dtype)
        return constrain(y if self.pre_norm else self.norm(y), "batch", None, None), new

    def __call__(
        self,
        x: Array,
        mask: Mask,
        noise: Noise,
        slots: Array | None = None,
        context: Array | None = None,
        turns: Turns | None = None,
        values: Array | None = None,
        residual: Array | None = None,
    ) -> Array:
        if context is not None and (mask.queries is None or slots is not None or self.global_projections):
            raise ValueError("a second sequence needs a mask with queries, and takes no slots and no global tokens")
        if mask.queries is not None and (mask.blocks is not None or mask.causal):
            raise ValueError("queries of a second sequence have no sparse pattern and no causal order")
        residual, x = x if residual is None else residual, self.norm(x) if self.pre_norm else x
        queries, keys = x, x if context is None else context
        sizes, dtype = self.sizes, self.program.compute
        weights = self._weights(x.shape[-1], keys.shape[-1], None if values is None else values.shape[-1])
        of_queries = turns
        if slots is not None and mask.blocks is None:  # too few queries for a kernel's blocks
            queries, seen, mixing = gather_positions(x, slots), chosen(mask, slots), plain.PLAIN
            if self.program.attention in PLAIN:
                mixing = plain_form(self.program.attention, mask)
            of_queries = turns and turns_at(turns, slots)
        else:
            seen = dataclasses.replace(mask, globals_apart=self.global_projections)
            mixing = self._mixing(x.shape[1], mask)
        operands = mixing.layout.operands(queries, keys, weights, sizes.heads, dtype, values)
        operands = operands if turns is None else mixing.layout.turn(operands, of_queries, turns)
        if asked := {PROJECTED, SHARES}.intersection(recorded(self)):
            apart = operands
            if mixing.layout is not HEADS_APART:
                apart = HEADS_APART.operands(queries, keys, weights, sizes.heads, dtype, values)
                apart = apart if turns is None else HEADS_APART.turn(apart, of_queries, turns)
            self.sow(PROJECTED, "operands", apart)
            if SHARES in asked:
                self.sow(SHARES, "shares", plain.shares(*apart[:2], mask, visible(mask)))
        mixed = mixing.mix(*operands, seen, dropout_rate=sizes.attention_dropout, noise=site(noise, 1))
        if slots is not None:
            residual = gather_positions(residual, slots)
            mixed = mixed if mask.blocks is None else gather_positions(mixed, slots)
        with jax.named_scope("output"):
            y = mixing.layout.output(mixed, weights.output, dtype)
        if self.global_projections:
            y = getattr(self, "global")(x, y, mask, weights.output, site(noise, 4), slots)
        y = residual + dropout(y, sizes.dropout, site(noise, 2))
        axis = mask.axis if slots is None else None
        return constrain(y if self.pre_norm else self.norm(y), "batch", axis, None)

    def _mixing(self, length: int, mask: Mask) -> Mixing:
        """Choose how whole rows attend."""
        named = self.program.attention
        if named in PLAIN:
            return plain_form(named, mask)
        attention = attention_of(self.sizes, length, mask.causal, mask.ranks is not None, mask.blocks)
        context = 0 if mask.queries is None else mask.segments.shape[1]
        biases = {"biased": mask.biased, "by_distance": mask.biased and mask.bias is None}
        attention = attention._replace(context=context, whole=mask.whole, **biases)
        return require(named, "self", attention).mixing(attention)


def plain_form(named: str, mask: Mask) -> Mixing:
    """Return the plain operations that a program's attention setting means for a mask: `plain.attention`, the same part
    by part in long rows, or in blocks, which cannot add a bias to the scores."""
    if named == "blocked" and mask.blocks is not None and mask.biased:
        raise ValueError("attention blocked does not add a bias to the scores: use dense or xla")
    if mask.blocks is None and named != "dense" and mask.segments.shape[1] > parts.LONGEST:
        return parts.IN_PARTS
    if mask.blocks is None or mask.biased or named == "dense":
        return plain.PLAIN
    wins = mask.segments.shape[1] > sparse.crossover(mask.blocks)
    return sparse.BLOCKED if named == "blocked" or wins else plain.PLAIN


def attention_of(
    sizes: LayerSizes,
    length: int,
    causal: bool = False,
    ranked: bool = False,
    blocks: Blocks | None = None,
    part: str = "",
) -> Attention:
    """Describe a layer's attention for kernels."""
    of_layer = (length, sizes.heads_width, sizes.heads, sizes.attention_dropout)
    if blocks is not None:
        of_heads = lambda array: None if array is None else array.shape[-1:]
        reach, dilation = of_heads(blocks.reach), of_heads(blocks.dilation)
        blocks = dataclasses.replace(blocks, drawn=blocks.drawn.shape[-3:], reach=reach, dilation=dilation)
    return Attention(*of_layer, causal=causal, ranked=ranked, blocks=blocks, part=part)
