"""What reads hidden states: the masked-token head, logits over tied embeddings."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.blocks.dense import ACTIVATIONS, Dense
from models.blocks.embeddings import padded_vocab
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.blocks.products import table_scores
from models.core.family import Inputs
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
        self.bias = self.param("bias", nn.initializers.zeros, (padded_vocab(self.vocab_size),))

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [n, width of the encoder], table f32[padded vocab, width] -> logits f32[n, padded vocab]."""
        y = self.norm(ACTIVATIONS[self.activation](self.dense(hidden)))
        return tied_logits(y, table, self.bias, self.vocab_size)


class TokenAndPairHeads(nn.Module):
    """A masked-token head and a classifier of pairs, for an encoder to inherit.

    Its setup makes `embeddings` and calls `make_heads`.
    """

    def make_heads(
        self, sizes: LayerSizes, vocab_size: int, embedding: int, pair: bool, dtype: jnp.dtype, pooler: bool = False
    ) -> None:
        """sizes: of the encoder's layers.   pair: whether there is a classifier.
        embedding: the width of the embeddings, with which the masked-token head shares its logits' weights.
        pooler: whether there is the classifier's first layer without it, too."""
        of_head = (embedding, vocab_size, sizes.activation, sizes.norm_epsilon, sizes.init_std, dtype)
        self.predictions = TokenHead(*of_head)
        self.pooler = Dense(sizes.width, sizes.init_std, dtype) if pair or pooler else None
        self.pair = Dense(2, sizes.init_std, jnp.float32) if pair else None

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


def tied_logits(hidden: Array, table: Array, bias: Array, vocab_size: int) -> Array:
    """hidden [n, width], embedding table f32[padded, width], bias f32[padded] -> logits f32[n, padded].

    The padding rows get -inf, so that they carry no probability and no gradient.
    """
    logits = constrain(table_scores(hidden, table, bias), "batch", "vocab")
    if table.shape[0] == vocab_size:
        return logits
    return jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, -jnp.inf)
