"""What BERT and the families of its form share: a config, the encoder with its heads, and what is counted of it."""

import dataclasses

import flax.linen as nn
from jax import Array

from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.self_attention import attention_of
from models.attention.transformer import encode, transformer_flops
from models.blocks.checks import TABLES, check_encoder
from models.blocks.embeddings import Embeddings
from models.blocks.heads import TokenAndPairHeads
from models.blocks.layer import layer_sizes
from models.core.family import Input, Inputs, Shape
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import Program
from models.core.ranges import check_ranges

INPUTS = {
    **dict.fromkeys(("tokens", "types", "segments"), Input(("length",))),
    "globals": Input(("globals",), required=False),  # of a sparse pattern, as `Mask` has them
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Sizes and rates of an encoder with its heads; those of BERT-base."""

    vocab_size: int = 30522  # without padding rows
    positions: int = 512  # the longest sequence
    types: int = 2  # segment types (A, B)
    width: int = 768  # hidden size
    depth: int = 12  # layers
    heads: int = 12  # of attention, in each layer
    feed_forward: int = 3072  # width inside the feed-forward block
    activation: str = "gelu"  # inside the feed-forward block
    dropout: float = 0.1  # of embeddings and block outputs
    attention_dropout: float = 0.1  # of attention probabilities
    norm_epsilon: float = 1e-12  # added to the variance in norms
    init_std: float = 0.02  # of the random weights at the start
    pattern: Pattern = Pattern()  # which keys a query sees
    pair_head: bool = True  # whether there are a pooler and a next-sentence classifier

    def __post_init__(self):
        check_ranges(self, TABLES, "model.")
        check_encoder(self)


class Encoder(TokenAndPairHeads):
    """The encoder with a masked-token head, and with one for pairs where there is one.

    head_activation: in the masked-token head; None for that of the layers.
    keeps_pooler: whether there is a pooler also without the head for pairs.
    own_globals: whether global tokens have projections of their own.
    padding_positions: as of `Embeddings`.
    """

    config: EncoderConfig
    program: Program
    head_activation: str | None = None
    keeps_pooler: bool = False
    own_globals: bool = False
    padding_positions: int = 0

    def setup(self):
        c = self.config
        sizes_of_tables = c.vocab_size, c.positions, c.types, c.width
        self.embeddings = Embeddings(*sizes_of_tables, c.norm_epsilon, c.init_std, self.padding_positions)
        sizes = layer_sizes(c)
        of_head = sizes._replace(activation=self.head_activation or sizes.activation)
        self.make_heads(of_head, c.vocab_size, c.width, c.pair_head, self.program.compute, self.keeps_pooler)

    @nn.compact
    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """The trunk; noise u32[rows, 2] switches dropout on -> [rows, length, width].

        slots: i32[rows, n], positions to compute alone, as far as the mathematics allows -> [rows, n, width].
        """
        config = self.config
        embedded = self.embeddings(inputs["tokens"], inputs["types"])
        x = dropout(embedded, config.dropout, site(noise, 0)).astype(self.program.compute)
        sizes, mask = layer_sizes(config), Mask(inputs["segments"], globals=inputs.get("globals"))
        of_layers = (sizes, config.depth, config.pattern, x, mask, site(noise, 1), self.program, slots)
        return encode(self, *of_layers, own_globals=self.own_globals)


def attentions(config: EncoderConfig, length: int, memory: int) -> list[Attention]:
    """For kernels: all layers; without a pattern all but the last, which is read at few positions."""
    blocks = blocks_of(config.pattern, config.depth, config.heads, length)
    return [attention_of(layer_sizes(config), length, blocks=blocks)] * (config.depth > 1 or blocks is not None)


def flops(config: EncoderConfig, shape: Shape, predictions: int) -> float:
    """Forward FLOPs with the vocabulary's logits at `predictions` positions per row; also with a pattern, the last
    layer's queries only where they are read. Tokens that rows name as global are few, and are not counted."""
    batch, length, read = shape.batch_size, shape.length, predictions + int(config.pair_head)
    head = 2 * batch * predictions * (config.width**2 + config.width * config.vocab_size)
    pair = 2 * batch * (config.width**2 + 2 * config.width) if config.pair_head else 0
    seen = pairs(config.pattern, config.depth, config.heads, length)
    return transformer_flops(config.width, config.depth, config.feed_forward, batch, length, read, seen) + head + pair
