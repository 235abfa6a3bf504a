"""What BERT and the families of its form share: a config, the encoder with its heads, and what is counted of it."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.self_attention import attention_of
from models.attention.transformer import encode
from models.blocks.checks import TABLES, check_encoder
from models.blocks.dense import Dense
from models.blocks.embeddings import Embeddings
from models.blocks.heads import TokenHead
from models.blocks.layer import layer_sizes
from models.core.family import Input, Inputs, Shape
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import Program
from models.core.ranges import check_ranges
from models.core.sharding import constrain

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

    @property
    def embedding(self) -> int:
        """The width of the embeddings."""
        return self.width

    @property
    def groups_of_blocks(self) -> dict[str, int]:
        """Block of a layer -> how many sets of parameters its layers share, where they do."""
        return {}


class Encoder(nn.Module):
    """The encoder with a masked-token head, and with one for pairs where there is one.

    projects: whether a product leads from the embeddings to the layers, whose width may then be another.
    head_activation: in the masked-token head; None for that of the layers.
    keeps_pooler: whether there is a pooler also without the head for pairs.
    own_globals: whether global tokens have projections of their own.
    padding_positions: as of `Embeddings`.
    """

    config: EncoderConfig
    program: Program
    projects: bool = False
    head_activation: str | None = None
    keeps_pooler: bool = False
    own_globals: bool = False
    padding_positions: int = 0

    def setup(self):
        c, dtype = self.config, self.program.compute
        sizes_of_tables = c.vocab_size, c.positions, c.types, c.embedding
        self.embeddings = Embeddings(*sizes_of_tables, c.norm_epsilon, c.init_std, self.padding_positions)
        self.project = Dense(c.width, c.init_std, dtype) if self.projects else None
        activation = self.head_activation or c.activation
        self.predictions = TokenHead(c.embedding, c.vocab_size, activation, c.norm_epsilon, c.init_std, dtype)
        self.pooler = Dense(c.width, c.init_std, dtype) if c.pair_head or self.keeps_pooler else None
        self.pair = Dense(2, c.init_std, jnp.float32) if c.pair_head else None

    @nn.compact
    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """The trunk; noise u32[rows, 2] switches dropout on -> [rows, length, width].

        slots: i32[rows, n], positions to compute alone, as far as the mathematics allows -> [rows, n, width].
        """
        c, mask = self.config, Mask(inputs["segments"], globals=inputs.get("globals"))
        embedded = self.embeddings(inputs["tokens"], inputs["types"])
        x = dropout(embedded, c.dropout, site(noise, 0)).astype(self.program.compute)
        x = self.project(x) if self.project else x
        of_layers = layer_sizes(c), c.depth, c.pattern, x, mask, site(noise, 1), self.program, slots
        return encode(self, *of_layers, groups=c.groups_of_blocks, own_globals=self.own_globals)

    def token_logits(self, hidden: Array) -> Array:
        """hidden [rows, n, width] -> f32[rows * n, padded vocab]."""
        read = constrain(hidden.reshape(-1, hidden.shape[-1]), "batch", None)
        return self.predictions(read, self.embeddings.tokens)

    def pair_logits(self, first: Array) -> Array:
        """first [rows, width], the hidden states at position 0 -> f32[rows, 2]; class 0: B follows A."""
        return self.pair(self.pooled(first))

    def pooled(self, first: Array) -> Array:
        """first [rows, width], the hidden states at position 0 -> the same, what a classifier of rows reads."""
        return jnp.tanh(self.pooler(first))

    def __call__(self, inputs: Inputs):
        """All parts once, for initialisation."""
        hidden = self.encode(inputs)
        read = self.pair_logits if self.pair else self.pooled if self.pooler else lambda first: None
        return self.token_logits(hidden[:, :1]), read(hidden[:, 0])


def attentions(config: EncoderConfig, length: int, memory: int) -> list[Attention]:
    """For kernels: all layers; without a pattern all but the last, which is read at few positions."""
    blocks = blocks_of(config.pattern, config.depth, config.heads, length)
    return [attention_of(layer_sizes(config), length, blocks=blocks)] * (config.depth > 1 or blocks is not None)


def seen(config: EncoderConfig, shape: Shape) -> float:
    """The share of pairs that a pattern names. Tokens that rows name as global are few, and are not counted."""
    return float(pairs(config.pattern, config.depth, config.heads, shape.length).mean()) / shape.length**2
