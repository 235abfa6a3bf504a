"""The causal decoder that GPT and similar families share: config, module, output logits, attention statistics, and a
function that declares such a family."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention import cache as caches
from models.attention.cache import Cache, empty_cache
from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.multi_head import attention_of
from models.attention.transformer import CachedTransformerLayer, TransformerLayer
from models.blocks.config import TrunkConfig
from models.blocks.embeddings import Embeddings, Term, padding_bias
from models.blocks.heads import WithHeads, tied_logits, usual_classes
from models.blocks.layer import layer_sizes
from models.blocks.norm import Norm
from models.blocks.stack import stack
from models.blocks.tables import GPT_FIELDS, GPT_SETTINGS
from models.core.family import Family, Head, Input, Inputs, Shape, declare
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.ranges import COUNT, check_ranges
from models.core.sharding import constrain

INPUTS = {
    **dict.fromkeys(("tokens", "segments"), Input(("length",))),
    "positions": Input(("length",), required=False),  # by default a token's position is its place in the row
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig(TrunkConfig):
    """Sizes and rates of a causal decoder; the defaults are those of GPT-2 with 124M parameters."""

    vocab_size: int = 50257  # number of tokens, without padding rows
    positions: int = 1024  # length of the longest sequence, in tokens
    activation: str = "gelu_new"  # activation function of the feed-forward block
    norm_epsilon: float = 1e-5  # added to the variance in norms
    labels: tuple[str, ...] = ()  # classes of a task head

    def __post_init__(self):
        check_ranges(self, {"positions": COUNT}, "model.")
        super().__post_init__()


class Decoder(WithHeads):
    """Embeddings, causal layers, and output logits whose table is the token embeddings.
    pre_norm: whether norms stand before the blocks, with one more after the last layer."""

    config: DecoderConfig
    pre_norm: bool = True
    take = staticmethod(caches.take)

    def setup(self):
        super().setup()
        c = self.config
        positions = (Term("positions", c.positions, "positions", by_place=True),)
        self.embeddings = Embeddings(c.vocab_size, c.width, positions, None, c.init_std)
        self.norm = Norm(c.norm_epsilon, self.program.compute, layer_sizes(c).norm) if self.pre_norm else None

    def embed(self, inputs: Inputs) -> Array:
        """Return the embeddings f32[rows, length, width], before dropout."""
        return self.embeddings(inputs)

    def decode(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Run the trunk -> [rows, length, width]. Dropout is on if noise u32[rows, 2] is given.
        A token sees itself and the earlier tokens of its segment."""
        x = dropout(self.embed(inputs), self.config.dropout, site(noise, 0)).astype(self.program.compute)
        return self.transform(x, Mask(inputs["segments"], causal=True), site(noise, 1))[0]

    def empty_cache(self, rows: int, places: int) -> Cache:
        """Return an empty cache."""
        return empty_cache(self.config.depth, rows, places, layer_sizes(self.config), self.program.compute)

    def begin(self, inputs: Inputs, room: int) -> tuple[Array, Cache]:
        """Read the first tokens as `advance` does -> (hidden, a cache of them with room for `room` more)."""
        rows, places = inputs["segments"].shape
        return self.advance(inputs, self.empty_cache(rows, places + room))

    def advance(self, inputs: Inputs, cache: Cache) -> tuple[Array, Cache]:
        """Run `decode` on tokens that follow the cached ones, without dropout -> (hidden [rows, n, width], the cache
        with the new tokens).

        A row has one segment, besides padding (0). `positions` are the tokens' positions in their texts, by default
        their places in the cache. Raises ValueError if the cache has no room for the tokens; where only the compiled
        program knows how full the cache is, all of hidden is NaN instead.
        """
        new, filled = inputs["segments"], cache.filled
        segments = caches.put(cache.segments, new, filled, 1)
        places = filled + jnp.broadcast_to(jnp.arange(new.shape[1]), new.shape)
        x = self.embed({"positions": places, **inputs}).astype(self.program.compute)
        x = jnp.where(caches.has_room(cache, new.shape[1]), x, jnp.nan)
        mask = caches.seen(segments, new, filled)
        x, (keys, values) = self.transform(x, (mask, filled), None, (cache.keys, cache.values))
        return x, Cache(keys, values, segments, filled + x.shape[1])

    @nn.compact
    def transform(self, x: Array, mask, noise: Noise, cached: tuple[Array, Array] | None = None):
        """Run the layers: x [rows, length, width] -> (the same shape, the cached keys and values with those of x, or
        None without a cache).
        mask: a Mask; with cached keys and values, (Mask, the number of filled places)."""
        kind = TransformerLayer if cached is None else CachedTransformerLayer
        layer = kind(layer_sizes(self.config), self.program, pre_norm=self.pre_norm, parent=None)
        x, new = stack(self, [layer], self.config.depth, x, mask, noise, self.program, states=cached)
        return constrain(self.norm(x) if self.norm else x, "batch", None if cached else "length", None), new

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        """Return the factors of the next token's logits: hidden [rows, n, width], table f32[padded vocab, width], bias
        f32[padded vocab], which is -inf for padding."""
        return hidden, self.embeddings.tokens, padding_bias(self.config.vocab_size)

    def token_logits(self, hidden: Array) -> Array:
        """Return the next token's logits f32[rows * n, padded vocab] for hidden [rows, n, width]; padding of the
        vocabulary is -inf."""
        hidden, table, bias = self.softmax(hidden)
        return tied_logits(hidden.reshape(-1, hidden.shape[-1]), table, bias, len(table))

    def __call__(self, inputs: Inputs):
        hidden = self.decode(inputs)
        return self.token_logits(hidden), self.apply_heads(hidden)


def attentions(config: DecoderConfig, shape: Shape, memory: int) -> list[Attention]:
    """Return the attentions that a kernel may compute: those of all layers."""
    return [attention_of(layer_sizes(config), shape.length, causal=True)]


def seen(config: DecoderConfig, shape: Shape) -> float:
    """Return the share of (query, key) pairs that a causal mask leaves visible; documents in a row are ignored."""
    return (shape.length + 1) / (2 * shape.length)


def decoder_family(model_type: str, heads: tuple[Head, ...], classes: str, tokens: str, **others: Any) -> Family:
    """Declare the family of GPT or of a relative.
    model_type: in its config.json.   classes: how the names of its classes begin.   tokens: its tensor of embeddings.
    others: as in `declare`."""
    usual = {
        "inputs": INPUTS,
        "seen": seen,
        "attention": "self",
        "attentions": attentions,
        "architectures": {f"{classes}LMHeadModel": (), **usual_classes(classes, heads)},
        "constants": {"model_type": model_type},
        "fields": GPT_FIELDS,
        "settings": GPT_SETTINGS,
        "tied": {"lm_head.weight": tokens},
        "prefix": "transformer.",
        "pair": None,
    }
    return declare(usual, heads=heads, **others)
