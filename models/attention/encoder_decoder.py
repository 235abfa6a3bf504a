"""An encoder, and beside it a decoder whose layers also see what the encoder gives (Vaswani et al. 2017, section 3.1).

Rows may hold several texts: tokens of the decoder see those of the encoder that have their segment.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention import cache as caches
from models.attention.cache import Cache, empty_cache
from models.attention.distances import Buckets, next_bias, row_bias
from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.multi_head import MultiHeadAttention, attention_of
from models.attention.transformer import TransformerLayer
from models.blocks.heads import tied_logits
from models.blocks.layer import LayerSizes, layer_sizes
from models.blocks.norm import Norm
from models.blocks.stack import stack
from models.core.family import Input, Inputs, Shape
from models.core.noise import dropout, site
from models.core.parameters import Noise, parameter
from models.core.program import Program
from models.core.sharding import constrain

INPUTS = {
    **dict.fromkeys(("tokens", "segments"), Input(("length",))),
    **dict.fromkeys(("decoder_tokens", "decoder_segments"), Input(("target_length",))),
}


class DecoderLayer(TransformerLayer):
    """A layer between whose blocks there is one that sees a second sequence; shared is the mask, that sequence [batch,
    keys, width] and the mask of what is seen of it."""

    def setup(self):
        super().setup()
        self.cross_attention = MultiHeadAttention(self.sizes, self.program, self.pre_norm)

    def __call__(
        self, x: Array, shared: tuple[Mask, Array, Mask], noise: Noise, state: None = None, slots: None = None
    ):
        mask, context, of_context = shared
        x = self.attention(x, mask, noise)
        x = self.cross_attention(x, of_context, site(noise, 5), context=context)
        return self.feed_forward(x, noise, mask.axis), None


class ContextLayer(DecoderLayer):
    """x, unchanged, and the keys and values that a layer makes of a second sequence, which is all that is shared."""

    def __call__(self, x: Array, shared: Array, noise: None, state: None = None, slots: None = None):
        return x, self.cross_attention.remembered(shared)


class CachedDecoderLayer(DecoderLayer):
    """With a cache: shared is its mask, how many places are filled and the mask of the second sequence; state the
    cached keys and values and those of the second sequence -> (x, the cached ones with those of x)."""

    def __call__(self, x: Array, shared: tuple[Mask, Array, Mask], noise: None, state, slots: None = None):
        (mask, filled, of_context), (cached, context) = shared, state
        x, new = self.attention.extend(x, mask, filled, cached)
        return self.feed_forward(self.cross_attention.recall(x, of_context, context), noise, None), new


class Side(nn.Module):
    """One of the two stacks; norms stand before the blocks, and one after the last layer.

    buckets: of the biases by distance.
    """

    sizes: LayerSizes
    depth: int
    program: Program
    buckets: Buckets

    def setup(self):
        sizes = self.sizes
        self.norm = Norm(sizes.norm_epsilon, self.program.compute, sizes.norm)
        init = nn.initializers.normal(sizes.init_std or sizes.width**-0.5)
        self.distances = parameter(self, "distances", init, (self.buckets.number, sizes.heads))

    def mask(self, segments: Array, **how: bool) -> Mask:
        """Of whole rows with segments i32[rows, n].   how: as of `Mask`."""
        length = segments.shape[1]
        return Mask(segments, distances=row_bias(self.distances, length, length, self.buckets), **how)

    def cached_bias(self, queries: int, places: int, filled: Array) -> Array:
        """What is added to the scores of tokens that follow those of a cache."""
        return next_bias(self.distances, queries, places, filled, self.buckets)

    @nn.compact
    def __call__(self, x: Array, shared: Any, noise: Noise, kind: type = TransformerLayer, states: Any = None):
        """x [rows, n, width] -> (the same, what layers of this kind put out beside it)."""
        layer = kind(self.sizes, self.program, pre_norm=True, parent=None)
        x, put_out = stack(self, [layer], self.depth, x, shared, noise, self.program, states=states)
        return self.norm(x), put_out


class EncoderDecoder(nn.Module):
    """Base of such families: a `setup` makes `encoder` and `decoder`, each a `Side`.

    start: the token before the first one of a text that is written.
    """

    config: Any
    program: Program
    start: int = 0

    def embed(self, tokens: Array) -> Array:
        """tokens i32[rows, n], or distributions of them, as of `token_rows` -> f32[rows, n, width], before dropout."""
        raise NotImplementedError

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        """As of `Decoder`."""
        raise NotImplementedError

    def encode(self, inputs: Inputs, noise: Noise = None) -> Array:
        """The encoder; noise u32[rows, 2] switches dropout on -> [rows, length, width]."""
        mask = self.encoder.mask(inputs["segments"])
        return self._side(self.encoder, inputs["tokens"], mask, mask.axis, noise)

    def decode_targets(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Both, the same -> [rows, target_length, width]: what the decoder knows at each of its tokens."""
        encoded, segments = self.encode(inputs, noise), inputs["decoder_segments"]
        mask = self.decoder.mask(segments, causal=True, whole=True)
        shared = mask, encoded, Mask(inputs["segments"], queries=segments, whole=True)
        return self._side(self.decoder, inputs["decoder_tokens"], shared, mask.axis, site(noise, 3), DecoderLayer)

    def _side(self, side: Side, tokens: Array, shared: Any, axis: str | None, noise: Noise, kind: type | None = None):
        rate = self.config.dropout
        x = dropout(self.embed(tokens), rate, site(noise, 0)).astype(self.program.compute)
        x, _ = side(constrain(x, "batch", axis, None), shared, site(noise, 1), kind or TransformerLayer)
        return constrain(dropout(x, rate, site(noise, 2)), "batch", axis, None)

    def begin(self, inputs: Inputs, room: int) -> tuple[Array, Cache]:
        """Of texts that the encoder reads: (hidden of the token that begins what is written after them [rows, 1,
        width], a cache with room for so many more)."""
        encoded, rows, side = self.encode(inputs), len(inputs["tokens"]), self.decoder
        _, (keys, values) = side(encoded, encoded, None, ContextLayer)
        cache = empty_cache(side.depth, rows, 1 + room, side.sizes, self.program.compute)
        context = Cache(keys, values, inputs["segments"], jnp.int32(keys.shape[3]))
        first = jnp.full((rows, 1), self.start, jnp.int32)
        first = {"tokens": first, "segments": jnp.ones_like(first)}
        return self.advance(first, cache._replace(context=context))

    def advance(self, inputs: Inputs, cache: Cache) -> tuple[Array, Cache]:
        """Further tokens of the decoder -> (hidden [rows, n, width], the cache with them); as of `Decoder`."""
        new, context = inputs["segments"], cache.context
        segments, filled = caches.put(cache.segments, new, cache.filled, 1), cache.filled
        mask = caches.seen(segments, new, filled, self.decoder.cached_bias(new.shape[1], segments.shape[1], filled))
        shared = mask, filled, Mask(context.segments, queries=new.reshape(len(context.segments), -1))
        x = self.embed(inputs["tokens"]).astype(self.program.compute)
        x = jnp.where(caches.has_room(cache, new.shape[1]), x, jnp.nan)
        states = (cache.keys, cache.values), (context.keys, context.values)
        x, (keys, values) = self.decoder(x, shared, None, CachedDecoderLayer, states)
        return x, Cache(keys, values, segments, filled + new.shape[1], context)

    def take(self, cache: Cache, rows: Array) -> Cache:
        """The cache of rows i32[n] of another's, each in the place of one that has read the same text: those of a text
        stand side by side, and all texts have as many."""
        return caches.take(cache, rows)

    def token_logits(self, hidden: Array) -> Array:
        """As of `Decoder`."""
        hidden, table, bias = self.softmax(hidden)
        return tied_logits(hidden.reshape(-1, hidden.shape[-1]), table, bias, len(table))

    def __call__(self, inputs: Inputs):
        """All parts once, for initialisation."""
        return self.token_logits(self.decode_targets(inputs))


def attentions(config: Any, shape: Shape, memory: int) -> list[Attention]:
    """For kernels: the encoder's, the decoder's, and what that sees of the encoder."""
    sizes = layer_sizes(config)
    target = attention_of(sizes, shape.target_length)._replace(whole=True)
    within = attention_of(sizes, shape.length), target._replace(causal=True)
    biased = [attention._replace(biased=True, by_distance=True) for attention in within]
    return [*biased, target._replace(context=shape.length)]


def seen(config: Any, shape: Shape) -> float:
    """The share of all pairs of both stacks that is left by the decoder's causal mask."""
    length, target = shape.length, shape.target_length
    others = config.depth * length**2 + config.decoder_depth * length * target
    causal = config.decoder_depth * target * (target + 1) / 2
    return (others + causal) / (others + config.decoder_depth * target**2)
