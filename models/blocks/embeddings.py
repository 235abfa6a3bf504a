"""Embedding tables."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.blocks.norm import Norm
from models.core.parameters import parameter
from models.core.sharding import constrain


class Embeddings(nn.Module):
    """Sum of token, position and type embeddings, normalised; the tables are f32[rows, width].

    Rows begin with their first token and end with their padding, so that a token's position is its place in the row.
    With one type, all tokens have it. padding_positions: rows beside, of positions that padding has in Hugging Face; no
    token reads them.
    """

    vocab_size: int
    positions: int
    types: int
    width: int
    norm_epsilon: float
    init_std: float
    padding_positions: int = 0

    def setup(self):
        normal = nn.initializers.normal(self.init_std)
        self.tokens = token_table(self, self.vocab_size, self.width, self.init_std)
        self.position_table = parameter(self, "positions", normal, (self.positions, self.width))
        if self.padding_positions:
            parameter(self, "padding_positions", nn.initializers.zeros, (self.padding_positions, self.width))
        self.type_table = parameter(self, "types", normal, (self.types, self.width))
        self.norm = Norm(self.norm_epsilon, jnp.float32)

    def __call__(self, tokens: Array, types: Array) -> Array:
        """tokens, types i32[batch, length] -> f32[batch, length, width], before dropout."""
        table = constrain(self.tokens, "vocab", None)
        summed = jnp.take(table, tokens, axis=0, mode="clip") + self.position_table[: tokens.shape[1]]
        if self.types == 1:
            of_types = self.type_table
        else:
            # A sum over the few types instead of a gather, whose gradient would be a scatter of [batch, length] rows.
            onehot = (types[..., None] == jnp.arange(self.types)).astype(jnp.float32)
            of_types = onehot @ self.type_table
        return constrain(self.norm(summed + of_types), "batch", "length", None)


class PositionedEmbeddings(nn.Module):
    """Sum of token and position embeddings; the tables are f32[rows, width]."""

    vocab_size: int
    positions: int
    width: int
    init_std: float

    def setup(self):
        self.tokens = token_table(self, self.vocab_size, self.width, self.init_std)
        normal = nn.initializers.normal(self.init_std)
        self.position_table = parameter(self, "positions", normal, (self.positions, self.width))

    def __call__(self, tokens: Array, positions: Array | None = None) -> Array:
        """Tokens as of `token_rows` -> f32[batch, length, width], before dropout.

        positions: i32[batch, length]; None for each token's place in the row.
        """
        of_tokens = token_rows(constrain(self.tokens, "vocab", None), tokens)
        table = self.position_table
        of_positions = table[: tokens.shape[1]] if positions is None else jnp.take(table, positions, 0, mode="clip")
        return constrain(of_tokens + of_positions, "batch", "length", None)


def token_rows(table: Array, tokens: Array) -> Array:
    """Rows of an embedding table f32[padded vocab, width] for tokens i32[batch, length], or their means for
    distributions of them f32[batch, length, padded vocab]: f32[batch, length, width]."""
    if tokens.ndim == 3:
        return tokens @ table
    return jnp.take(table, tokens, axis=0, mode="clip")


def padded_vocab(vocab_size: int) -> int:
    """Rows of the embedding table: the vocabulary rounded up to a multiple of 128, the lanes of a TPU."""
    return -(-vocab_size // 128) * 128


def token_table(module: nn.Module, vocab_size: int, width: int, init_std: float) -> Array:
    """The parameter 'tokens' of a module, an embedding table f32[padded, width]; its padding rows are 0.

    They stay so: `tied_logits` gives them no gradient, and a decay of 0 is 0. So no norm over the table, such as that
    of LAMB's trust ratio, counts them. Those of a checkpoint that has others are kept, decay, and are counted.
    """

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        drawn = nn.initializers.normal(init_std)(key, shape)
        return jnp.where(jnp.arange(shape[0])[:, None] < vocab_size, drawn, 0)

    return parameter(module, "tokens", init, (padded_vocab(vocab_size), width))
