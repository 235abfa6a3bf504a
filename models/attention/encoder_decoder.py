"""An encoder and a decoder with cross-attention to the encoder's output (Vaswani et al. 2017, section 3.1).

A row may hold several texts: a token of the decoder sees the tokens of the encoder that have its segment.
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
from models.blocks.embeddings import token_rows
from models.blocks.heads import WithHeads, tied_logits
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
    # Not in the rows of tasks, whose texts both stacks read
    **dict.fromkeys(("decoder_tokens", "decoder_segments"), Input(("target_length",), required=False)),
}


class DecoderLayer(TransformerLayer):
    """A layer with cross-attention to a second sequence between self-attention and feed-forward.
    shared: (the mask of self-attention, the second sequence [batch, keys, width], the mask of cross-attention)."""

    def setup(self):
        super().setup()
        self.cross_attention = MultiHeadAttention(self.sizes, self.program, self.pre_norm)

    def __call__(self, x: Array, shared: tuple, noise: Noise, state: None = None, slots: None = None):
        mask, context, cross_mask = shared
        x = self.attention(x, mask, noise)
        x = self.cross_attention(x, cross_mask, site(noise, 5), context=context)
        return self.feed_forward(x, noise, mask.axis), None


class ContextLayer(DecoderLayer):
    """Returns x unchanged, and the keys and values of the layer's cross-attention.   shared: the second sequence."""

    def __call__(self, x: Array, shared: Array, noise: None, state: None = None, slots: None = None):
        return x, self.cross_attention.remembered(shared)


class CachedDecoderLayer(DecoderLayer):
    """A `DecoderLayer` with a cache -> (x, the cached keys and values with those of x).

    shared: (the cache's mask, the number of filled places, the mask of cross-attention).   state: (the cached keys and
    values, those of the second sequence).
    """

    def __call__(self, x: Array, shared: tuple, noise: None, state: tuple, slots: None = None):
        (mask, filled, cross_mask), (cached, context) = shared, state
        x, new = self.attention.extend(x, mask, filled, cached)
        return self.feed_forward(self.cross_attention.recall(x, cross_mask, context), noise, None), new


class Stack(nn.Module):
    """One of the two stacks.

    pre_norm: whether norms stand before the blocks; then the stack ends with one more, and dropout.
    buckets: of relative position biases; None without them.   rows: number of other positions.
    """

    sizes: LayerSizes
    depth: int
    program: Program
    pre_norm: bool = False
    buckets: Buckets | None = None
    rows: int = 0

    def setup(self):
        sizes = self.sizes
        self.norm = Norm(sizes.norm_epsilon, self.program.compute, sizes.norm) if self.pre_norm else None
        if self.buckets is not None:
            init = nn.initializers.normal(sizes.init_std or sizes.width**-0.5)
            self.distances = parameter(self, "distances", init, (self.buckets.number, sizes.heads))

    def with_positions(self, x: Array, positions: Array | None = None) -> Array:
        """Add positions to embeddings x f32[rows, n, width], which are those at i32[rows, n], by default 0, 1, 2 ..."""
        return x

    def mask(self, segments: Array, **how: bool) -> Mask:
        """Return the mask of whole rows with segments i32[rows, n].   how: as in `Mask`."""
        if self.buckets is None:
            return Mask(segments, **how)
        length = segments.shape[1]
        return Mask(segments, distances=row_bias(self.distances, length, length, self.buckets), **how)

    def cached_bias(self, queries: int, places: int, filled: Array) -> Array | None:
        """Return the position biases, if any, of tokens that follow the cached ones."""
        return None if self.buckets is None else next_bias(self.distances, queries, places, filled, self.buckets)

    @nn.compact
    def __call__(self, x: Array, shared: Any, noise: Noise, kind: type = TransformerLayer, states: Any = None):
        """Run the layers: x [rows, n, width] -> (the same shape, what layers of this kind return besides x)."""
        layer = kind(self.sizes, self.program, pre_norm=self.pre_norm, parent=None)
        x, put_out = stack(self, [layer], self.depth, x, shared, noise, self.program, states=states)
        return self.norm(x) if self.pre_norm else x, put_out


class EncoderDecoder(WithHeads):
    """Base class of encoder-decoder families, whose `setup` makes `encoder` and `decoder`, each a `Stack`, and the
    embeddings `tokens` of both.
    start: the decoder's token before the first token of a text."""

    start: int = 0
    take = staticmethod(caches.take)

    def embed(self, tokens: Array) -> Array:
        """Embed tokens i32[rows, n], or distributions as in `token_rows` -> f32[rows, n, width], without positions."""
        return token_rows(constrain(self.tokens, "vocab", None), tokens)

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        raise NotImplementedError

    def encode(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Run the encoder -> [rows, length, width]. Dropout is on if noise u32[rows, 2] is given."""
        return self.encode_embedded(self.encoder, self.embed(inputs["tokens"]), inputs, noise)

    def encode_embedded(self, encoder: Stack, embedded: Array, inputs: Inputs, noise: Noise) -> Array:
        """Run an encoder on embeddings f32[rows, length, width] of the inputs' tokens -> [rows, length, width]."""
        mask = encoder.mask(inputs["segments"])
        return self._run(encoder, encoder.with_positions(embedded, inputs.get("positions")), mask, mask.axis, noise)

    def decode_targets(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Run encoder and decoder -> the decoder's output [rows, target_length, width]; noise as in `encode`."""
        encoded, segments = self.encode(inputs, noise), inputs["decoder_segments"]
        mask = self.decoder.mask(segments, causal=True, whole=True)
        shared = mask, encoded, Mask(inputs["segments"], queries=segments, whole=True)
        x = self.decoder.with_positions(self.embed(inputs["decoder_tokens"]))
        return self._run(self.decoder, x, shared, mask.axis, site(noise, 3), DecoderLayer)

    def decode_again(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Run both stacks on the same texts -> the decoder's output [rows, length, width], as heads for tasks read it.

        The decoder reads the tokens behind the start token (Lewis et al. 2020, section 3)."""
        tokens = jnp.pad(inputs["tokens"][:, :-1], ((0, 0), (1, 0)), constant_values=self.start)
        return self.decode_targets({**inputs, "decoder_tokens": tokens, "decoder_segments": inputs["segments"]}, noise)

    def _run(self, layers: Stack, x: Array, shared: Any, axis: str | None, noise: Noise, kind=TransformerLayer):
        rate = self.config.dropout
        x = dropout(x, rate, site(noise, 0)).astype(self.program.compute)
        x, _ = layers(constrain(x, "batch", axis, None), shared, site(noise, 1), kind)
        return constrain(dropout(x, rate, site(noise, 2)) if layers.pre_norm else x, "batch", axis, None)

    def begin(self, inputs: Inputs, room: int) -> tuple[Array, Cache]:
        """Encode texts and read the decoder's start token -> (its hidden [rows, 1, width], a cache with room for `room`
        more tokens)."""
        encoded, rows, decoder = self.encode(inputs), len(inputs["tokens"]), self.decoder
        _, (keys, values) = decoder(encoded, encoded, None, ContextLayer)
        cache = empty_cache(decoder.depth, rows, 1 + room, decoder.sizes, self.program.compute)
        context = Cache(keys, values, inputs["segments"], jnp.int32(keys.shape[3]))
        first = jnp.full((rows, 1), self.start, jnp.int32)
        first = {"tokens": first, "segments": jnp.ones_like(first), "positions": jnp.zeros_like(first)}
        return self.advance(first, cache._replace(context=context))

    def advance(self, inputs: Inputs, cache: Cache) -> tuple[Array, Cache]:
        """Read more tokens of the decoder -> (hidden [rows, n, width], the cache with them); see `Decoder.advance`."""
        new, context = inputs["segments"], cache.context
        segments, filled = caches.put(cache.segments, new, cache.filled, 1), cache.filled
        mask = caches.seen(segments, new, filled, self.decoder.cached_bias(new.shape[1], segments.shape[1], filled))
        shared = mask, filled, Mask(context.segments, queries=new.reshape(len(context.segments), -1))
        places = filled + jnp.broadcast_to(jnp.arange(new.shape[1]), new.shape)
        x = self.embed(inputs["tokens"])
        x = self.decoder.with_positions(x, inputs.get("positions", places)).astype(self.program.compute)
        x = jnp.where(caches.has_room(cache, new.shape[1]), x, jnp.nan)
        states = (cache.keys, cache.values), (context.keys, context.values)
        x, (keys, values) = self.decoder(x, shared, None, CachedDecoderLayer, states)
        return x, Cache(keys, values, segments, filled + new.shape[1], context)

    def token_logits(self, hidden: Array) -> Array:
        hidden, table, bias = self.softmax(hidden)
        return tied_logits(hidden.reshape(-1, hidden.shape[-1]), table, bias, len(table))

    def __call__(self, inputs: Inputs):
        hidden = self.decode_targets(inputs) if "decoder_tokens" in inputs else self.decode_again(inputs)
        return self.token_logits(hidden), self.apply_heads(hidden)


def decoder_length(shape: Shape) -> int:
    """Return how many tokens the decoder reads; without a target length those that the encoder reads."""
    return getattr(shape, "target_length", shape.length)


def attentions(config: Any, shape: Shape, memory: int) -> list[Attention]:
    """Return the attentions that a kernel may compute: self-attention of encoder and decoder, and cross-attention."""
    sizes = layer_sizes(config)
    target = attention_of(sizes, decoder_length(shape))._replace(whole=True)
    within = attention_of(sizes, shape.length), target._replace(causal=True)
    if hasattr(config, "buckets"):
        within = [attention._replace(biased=True, by_distance=True) for attention in within]
    return [*within, target._replace(context=shape.length)]


def seen(config: Any, shape: Shape) -> float:
    """Return the share of the (query, key) pairs of both stacks that the decoder's causal mask leaves visible."""
    length, target = shape.length, decoder_length(shape)
    others = config.depth * length**2 + config.decoder_depth * length * target
    causal = config.decoder_depth * target * (target + 1) / 2
    return (others + causal) / (others + config.decoder_depth * target**2)
