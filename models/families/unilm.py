"""UniLM (Dong et al. 2019, arXiv:1905.03197): BERT's encoder, in which each row says which tokens a token sees.

The token types are segments and tasks at once, as in its authors' code: 0 and 1 for the two segments of rows in which
all tokens see all, 2 from left to right, 3 from right to left, 4 and 5 for a source and its target. A text is written
as the target of a source: a [MASK] is put at its end, predicted, replaced by the token, and followed by the next one.

Hugging Face: BertForMaskedLM with `type_vocab_size` 6, and BERT's classes with task heads. They know no tasks: tokens
see what the attention mask that a user passes says, by default all tokens.
"""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from models.attention import cache as caches
from models.attention.cache import Cache, empty_cache
from models.attention.encoder import Encoder, EncoderConfig, encoder_family
from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.multi_head import attention_of
from models.attention.patterns.pattern import DENSE
from models.attention.transformer import CachedTransformerLayer
from models.blocks.config import sized
from models.blocks.heads import bert_heads
from models.blocks.layer import layer_sizes
from models.blocks.stack import stack
from models.core.family import Input, Inputs, Shape

INPUTS = {
    **dict.fromkeys(("tokens", "types", "segments"), Input(("length",))),
    # A token sees those of no higher rank; without ranks all of its segment
    "ranks": Input(("length",), required=False),
}
TYPES = 6


@dataclasses.dataclass(frozen=True)
class UniLMConfig(EncoderConfig):
    """The fields with other defaults than BERT's."""

    vocab_size: int = 28996  # number of tokens, without padding rows
    types: int = TYPES  # number of token types: segments and tasks

    def __post_init__(self):
        super().__post_init__()
        if self.types != TYPES:
            raise ValueError(f"model.types={self.types}: UniLM's tasks have {TYPES}; leave it out")
        if self.pattern.name != DENSE:
            raise ValueError(f"model.pattern.name={self.pattern.name}: UniLM has no sparse attention; leave it out")


class UniLM(Encoder):
    """An encoder with a mask for each row.   sides: token types of a source and its target."""

    sides: ClassVar[tuple[int, int]] = (4, 5)
    take = staticmethod(caches.take)

    def mask(self, inputs: Inputs) -> Mask:
        """Return which tokens see which."""
        if (ranks := inputs.get("ranks")) is None:
            return Mask(inputs["segments"])
        return Mask(inputs["segments"], ranks, ranks + 1)

    def begin(self, inputs: Inputs, room: int) -> tuple[Array, Cache]:
        """Read left-padded sources, each with a [MASK] after it -> (hidden [rows, length, width], a cache of the
        sources with room for `room` more tokens)."""
        rows, places = inputs["tokens"].shape
        sizes, is_mask = layer_sizes(self.config), jnp.arange(places) == places - 1
        cache = empty_cache(self.config.depth, rows, places + room, sizes, self.program.compute)
        cache = cache._replace(mask=inputs["tokens"][0, -1])
        types = jnp.broadcast_to(jnp.where(is_mask, *self.sides[::-1]), (rows, places))
        return self._read({**inputs, "types": types}, cache, jnp.where(is_mask, places, places - 1))

    def advance(self, inputs: Inputs, cache: Cache) -> tuple[Array, Cache]:
        """Read the tokens for the last [MASK]s, and a [MASK] after them -> (hidden [rows, n + 1, width], the cache with
        the tokens).   Raises ValueError, or returns NaN, as `Decoder.advance` does."""
        masked = lambda array, last: jnp.concatenate([array, jnp.broadcast_to(last, (len(array), 1))], axis=1)
        positions = inputs["positions"]  # counted with the [MASK] that was read before
        more = {
            "tokens": masked(inputs["tokens"], cache.mask),
            "segments": masked(inputs["segments"], inputs["segments"][:, -1:]),
            "positions": masked(positions - 1, positions[:, -1:]),
        }
        types = jnp.full_like(more["tokens"], self.sides[1])
        return self._read({**more, "types": types}, cache, cache.filled + 1 + jnp.arange(types.shape[1]))

    def _read(self, inputs: Inputs, cache: Cache, reach: Array) -> tuple[Array, Cache]:
        """Read tokens that follow the cached ones -> (hidden, the cache with all but the last, a [MASK]).
        reach: i32[n], how many places of the cache each token sees."""
        new, filled = inputs["segments"], cache.filled
        segments = caches.put(cache.segments, new, filled, 1)
        places = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
        mask = Mask(segments, places, jnp.broadcast_to(reach, new.shape), queries=new)
        x = self.embeddings(inputs).astype(self.program.compute)
        x = jnp.where(caches.has_room(cache, new.shape[1]), x, jnp.nan)
        layer = CachedTransformerLayer(layer_sizes(self.config), self.program, parent=None)
        depth, states = self.config.depth, (cache.keys, cache.values)
        x, (keys, values) = stack(self, [layer], depth, x, (mask, filled), None, self.program, states=states)
        return x, cache._replace(keys=keys, values=values, segments=segments, filled=filled + new.shape[1] - 1)


def attentions(config: UniLMConfig, shape: Shape, memory: int) -> list[Attention]:
    """Return the attentions that a kernel may compute, as of `Encoder`, whose masks have ranks."""
    return [attention_of(layer_sizes(config), shape.length, ranked=True)] * (config.depth > 1)


_size = functools.partial(sized, UniLMConfig)
FAMILY = encoder_family(
    config=UniLMConfig,
    sizes={
        "tiny": _size(2, 128),
        "base": _size(12, 768),  # the published checkpoints
        "large": _size(24, 1024),  # Dong et al. 2019, section 2.4
    },
    heads=bert_heads("bert.pooler.dense"),
    model_type="bert",
    decoder="cls.predictions",
    classes="Bert",
    constants={"type_vocab_size": TYPES},
    continues={"bert": {}},
    inputs=INPUTS,
    trunk=UniLM,
    attentions=attentions,
)
FAMILIES = {"unilm": FAMILY}
