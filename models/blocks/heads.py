"""What reads hidden states: the masked-token head, logits over tied embeddings."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.blocks.activations import ACTIVATIONS
from models.blocks.dense import Dense
from models.blocks.embeddings import padded_vocab
from models.blocks.norm import Norm
from models.blocks.products import table_scores
from models.core.parameters import parameter
from models.core.sharding import constrain


class TokenHead(nn.Module):
    """The masked-token head up to the tied decoder: dense, activation, norm; and the decoder's bias."""

    width: int
    vocab_size: int
    activation: str
    norm_epsilon: float
    init_std: float
    dtype: jnp.dtype

    def setup(self):
        self.dense = Dense(self.width, self.init_std, self.dtype)
        self.norm = Norm(self.norm_epsilon, self.dtype)
        self.bias = parameter(self, "bias", nn.initializers.zeros, (padded_vocab(self.vocab_size),))

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [n, width of the encoder], table f32[padded vocab, width] -> logits f32[n, padded vocab]."""
        y = self.norm(ACTIVATIONS[self.activation](self.dense(hidden)))
        return tied_logits(y, table, self.bias, self.vocab_size)


def tied_logits(hidden: Array, table: Array, bias: Array, vocab_size: int) -> Array:
    """hidden [n, width], embedding table f32[padded, width], bias f32[padded] -> logits f32[n, padded].

    The padding rows get -inf, so that they carry no probability and no gradient.
    """
    logits = constrain(table_scores(hidden, table, bias), "batch", "vocab")
    if table.shape[0] == vocab_size:
        return logits
    return jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, -jnp.inf)
