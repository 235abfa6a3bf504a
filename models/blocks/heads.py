"""What reads hidden states: the masked-token head, logits over tied embeddings."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.blocks.dense import ACTIVATIONS, Dense
from models.blocks.embeddings import padded_vocab
from models.blocks.norm import Norm
from models.blocks.products import (
    _scores,
)
from models.core.sharding import constrain, current_rules


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
        self.bias = self.param("bias", nn.initializers.zeros, (padded_vocab(self.vocab_size),))

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [n, width of the encoder], table f32[padded vocab, width] -> logits f32[n, padded vocab]."""
        y = self.norm(ACTIVATIONS[self.activation](self.dense(hidden)))
        return tied_logits(y, table, self.bias, self.vocab_size)


def tied_logits(hidden: Array, table: Array, bias: Array, vocab_size: int) -> Array:
    """hidden [n, width], embedding table f32[padded, width], bias f32[padded] -> logits f32[n, padded].

    The padding rows get -inf, so that they carry no probability and no gradient.
    """
    logits = constrain(_scores(hidden, table, bias), "batch", "vocab")
    if table.shape[0] == vocab_size:
        return logits
    return jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, -jnp.inf)


def gather_positions(x: Array, positions: Array) -> Array:
    """x [batch, length, ...] at positions i32[batch, n] -> [batch, n, ...]."""
    if current_rules() is None:
        return jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(x, positions)
    # A product with ones and zeros takes each device's own rows; a gather sends rows to all devices.
    chosen = (positions[..., None] == jnp.arange(x.shape[1])).astype(x.dtype)
    taken = jnp.einsum("bnl,bl...->bn...", chosen, x, precision="highest")
    return constrain(taken, "batch", *(None,) * (x.ndim - 1))
