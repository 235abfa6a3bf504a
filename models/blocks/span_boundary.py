"""The head of SpanBERT's span boundary objective (Joshi et al. 2020, arXiv:1907.10529, section 3.2), which predicts a
token of a span from the tokens on either side of the span and the token's place in it."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.blocks.activations import ACTIVATIONS
from models.blocks.dense import Dense
from models.blocks.embeddings import padded_vocab
from models.blocks.heads import tied_logits
from models.blocks.norm import Norm
from models.blocks.tables import dense_parameters, norm_parameters
from models.core.family import Head
from models.core.parameters import Parameter, parameter
from models.core.program import Program
from models.core.sharding import constrain

BOUNDARY = "boundary"  # the name of the head
PLACES = 32  # in a span that have an embedding each; later ones share the last. The paper gives no number


class SpanBoundary(nn.Module):
    """Two layers of GELU and norm on [left; right; embedding of the place], then logits over the tied embeddings with a
    bias of its own. The embedding is as wide as the model; the paper gives no size."""

    width: int
    features: int
    vocab_size: int
    norm_epsilon: float
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, left: Array, table: Array, right: Array | None = None, places: Array | None = None) -> Array:
        """Return logits f32[rows * n, padded] of tokens at places i32[rows, n], from 0 on, of their spans.

        left, right: [rows, n, width], the hidden states before and after each token's span; without `right`, for
        initialisation, the same one.   table: f32[padded, features], the token embeddings.
        """
        right = left if right is None else right
        places = jnp.zeros(left.shape[:2], jnp.int32) if places is None else places
        positions = parameter(self, "positions", nn.initializers.normal(self.init_std), (PLACES, self.width))
        place = jnp.take(positions, places, axis=0, mode="clip").astype(left.dtype)
        hidden = jnp.concatenate([left, right, place], -1).reshape(-1, 3 * self.width)  # [rows * n, 3 width]
        hidden = constrain(hidden, "batch", None)
        for name in ("first", "second"):
            dense = Dense(self.features, self.init_std, self.dtype, name=name)(hidden)
            hidden = Norm(self.norm_epsilon, self.dtype, name=f"{name}_norm")(ACTIVATIONS["gelu"](dense))
        bias = parameter(self, "bias", nn.initializers.zeros, (padded_vocab(self.vocab_size),))
        return tied_logits(hidden, table, bias, self.vocab_size)


def boundary_head() -> Head:
    """Return the head, which no Hugging Face class has."""

    def module(c: Any, program: Program) -> SpanBoundary:
        return SpanBoundary(c.width, c.embedding, c.vocab_size, c.norm_epsilon, c.init_std, program.compute)

    rows = [Parameter(f"{BOUNDARY}/positions", (None, "width"), {}), Parameter(f"{BOUNDARY}/bias", ("vocab",), {})]
    for name, inputs in (("first", None), ("second", "embedding")):
        rows += dense_parameters(f"{BOUNDARY}/{name}", (inputs, "embedding"), {})
        rows += norm_parameters(f"{BOUNDARY}/{name}_norm", ("embedding",), {})
    return Head(BOUNDARY, module, tuple(rows))
