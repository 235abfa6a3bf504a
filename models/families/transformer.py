"""The Transformer (Vaswani et al. 2017, arXiv:1706.03762): an encoder and a decoder with sinusoidal positions, norms
behind the blocks, and one table for the embeddings of both and for the softmax.

Hugging Face: MarianMTModel, which computes the same.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from models.attention.absolute import AbsoluteConfig, AbsoluteEncoderDecoder, absolute_family
from models.attention.encoder_decoder import Stack
from models.attention.relative import sinusoids
from models.blocks.config import check_even


@dataclasses.dataclass(frozen=True)
class TransformerConfig(AbsoluteConfig):
    """`AbsoluteConfig`, with weights of variance 1 / inputs (in Tensor2Tensor 2 / (inputs + outputs))."""

    init_std: ClassVar[None] = None

    def __post_init__(self):
        super().__post_init__()
        check_even(self)


class SinusoidalStack(Stack):
    """A stack with sinusoidal positions (section 3.5), first the sines, then the cosines."""

    def with_positions(self, x: Array, positions: Array | None = None) -> Array:
        table = jnp.asarray(sinusoids(self.rows - 1, 0, self.sizes.width)[::-1])
        return x + (table[: x.shape[1]] if positions is None else jnp.take(table, positions, 0, mode="clip"))


class Transformer(AbsoluteEncoderDecoder):
    """Both stacks, with scaled embeddings (section 3.4)."""

    kind: ClassVar[type] = SinusoidalStack

    def embed(self, tokens: Array) -> Array:
        return super().embed(tokens) * self.config.width**0.5


FAMILY = absolute_family(
    config=TransformerConfig,
    model_type="marian",
    sizes={
        "tiny": TransformerConfig(positions=256, width=128, depth=2, decoder_depth=2, heads=2, feed_forward=512),
        # Vaswani et al. 2017, table 3
        "base": TransformerConfig(),
        "big": TransformerConfig(width=1024, heads=16, feed_forward=4096, dropout=0.3),
    },
    trunk=Transformer,
    table=lambda config: [],
    architectures={"MarianMTModel": ()},
    constants={"pad_token_id": 0, "decoder_start_token_id": 0, "scale_embedding": True},
    pair=None,
    prepare="--tokenizer sentencepiece-bpe --specials t5",
    assumed={"share_encoder_decoder_embeddings": True},
)
FAMILIES = {"transformer": FAMILY}
