"""Embedding tables."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.blocks.norm import Norm
from models.core.family import Inputs
from models.core.parameters import parameter
from models.core.sharding import constrain


class Term(NamedTuple):
    """A further embedding table, whose rows are added to those of the tokens.

    name: of its parameter.   rows: of the table.   reads: name of the input i32[batch, length] with each token's row.
    by_place: whether, without that input, a token's row is its place in the sequence.
    padding: number of additional rows, which Hugging Face uses for the positions of padding; no token reads them.
    """

    name: str
    rows: int
    reads: str
    by_place: bool = False
    padding: int = 0


FEW = 8  # up to this many rows use a product: the gradient of a gather would be a scatter of [batch, length] rows


class Embeddings(nn.Module):
    """The sum of the embeddings of tokens and of all terms; the tables are f32[rows, width].

    Sequences are padded at the end only. If a table has a single row, all tokens get it.
    norm_epsilon, norm_kind: of the norm of the sum; None for no norm.   token_width: that of `tokens`, if different.
    """

    vocab_size: int
    width: int
    terms: tuple[Term, ...]
    norm_epsilon: float | None
    init_std: float
    norm_kind: str = "layer"
    token_width: int | None = None

    def setup(self):
        self.tokens = token_table(self, self.vocab_size, self.token_width or self.width, self.init_std)
        tables = []
        for name, rows, _, _, padding in self.terms:
            tables.append(parameter(self, name, nn.initializers.normal(self.init_std), (rows, self.width)))
            if padding:
                parameter(self, f"padding_{name}", nn.initializers.zeros, (padding, self.width))
        self.tables = tables
        self.norm = None if self.norm_epsilon is None else Norm(self.norm_epsilon, jnp.float32, self.norm_kind)

    def __call__(self, inputs: Inputs, base: Array | None = None) -> Array:
        """Embed `tokens`, as in `token_rows`, and the terms' inputs -> f32[batch, length, width], before dropout.
        base: f32[rows, width], a table of another module, of which this one's tokens have the differences."""
        tokens = inputs["tokens"]
        summed = token_rows(constrain(self.tokens, "vocab", None), tokens)
        if base is not None:
            summed += token_rows(constrain(base, "vocab", None), tokens)
        return self.with_terms(summed, inputs)

    def with_terms(self, summed: Array, inputs: Inputs) -> Array:
        """Add the terms to f32[batch, length, width], and apply the norm."""
        for (_, rows, reads, by_place, _), table in zip(self.terms, self.tables, strict=True):
            if rows == 1:
                summed += table
            elif by_place and reads not in inputs:
                summed += table[: summed.shape[1]]
            elif rows <= FEW:
                is_row = (inputs[reads][..., None] == jnp.arange(rows)).astype(jnp.float32)
                summed += jnp.matmul(is_row, table, precision="highest")
            else:
                summed += jnp.take(table, inputs[reads], axis=0, mode="clip")
        return constrain(self.norm(summed) if self.norm else summed, "batch", "length", None)


def token_rows(table: Array, tokens: Array) -> Array:
    """Look up tokens i32[batch, length] in an embedding table f32[padded vocab, width] -> f32[batch, length, width].
    Distributions over tokens f32[batch, length, padded vocab] give the weighted means of rows."""
    if tokens.ndim == 3:
        return tokens @ table
    return jnp.take(table, tokens, axis=0, mode="clip")


def padded_vocab(vocab_size: int) -> int:
    """Return the rows of the embedding table: the vocabulary rounded up to a multiple of 128, the lanes of a TPU."""
    return -(-vocab_size // 128) * 128


def padding_bias(vocab_size: int) -> Array:
    """Return a bias f32[padded] of logits over an embedding table: 0 for tokens, -inf for padding rows."""
    padded = padded_vocab(vocab_size)
    if padded == vocab_size:  # XLA leaves the addition out
        return jnp.zeros(padded)
    return jnp.where(jnp.arange(padded) < vocab_size, 0.0, -jnp.inf)


def token_table(module: nn.Module, vocab_size: int, width: int, init_std: float, name: str = "tokens") -> Array:
    """Make a parameter of a module: an embedding table f32[padded, width], whose padding rows are 0.
    They stay 0: `tied_logits` gives them no gradient, and weight decay of 0 is 0. So they do not count in a norm over
    the table, such as that of LAMB's trust ratio. Other values, from a checkpoint, are kept, decay, and do count."""

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        drawn = nn.initializers.normal(init_std)(key, shape)
        return jnp.where(jnp.arange(shape[0])[:, None] < vocab_size, drawn, 0)

    return parameter(module, name, init, (padded_vocab(vocab_size), width))
