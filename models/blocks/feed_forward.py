"""The position-wise feed-forward block."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.blocks.activations import ACTIVATIONS
from models.blocks.dense import Dense
from models.blocks.layer import LayerSizes
from models.blocks.norm import Norm
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import kept
from models.core.sharding import constrain


class FeedForward(nn.Module):
    """The feed-forward block with its residual: norm(x + dropout(block(x))), or pre-norm x + dropout(block(norm(x))).

    x: [batch, n, width].   block: down(activation(up(x))), or, gated, down(activation(up(x)) * gate(x)) (Shazeer 2020,
    equation 6), with dropout after the activation if `inner_dropout`.
    """

    sizes: LayerSizes
    dtype: jnp.dtype
    pre_norm: bool = False

    @nn.compact
    def __call__(self, x: Array, noise: Noise, axis: str | None = "length") -> Array:
        """axis: logical axis of the n positions for the mesh; None if they are not the whole length."""
        sizes, tag = self.sizes, 3  # 1 and 2 are the attention's
        norm = Norm(sizes.norm_epsilon, self.dtype, sizes.norm, name="norm")
        inputs = norm(x) if self.pre_norm else x

        def inner(name):
            y = Dense(sizes.feed_forward, sizes.init_std, self.dtype, sizes.biases, name=name)(inputs)
            return constrain(y, "batch", axis, "feed_forward")

        y = ACTIVATIONS[sizes.activation](inner("up"))
        y = kept(y) * kept(inner("gate")) if sizes.gated else y
        if sizes.inner_dropout:
            y, tag = dropout(y, sizes.dropout, site(noise, tag)), tag + 1
        held = None if sizes.activation == "relu" and not sizes.gated else kept(y)  # relu keeps its input
        y = Dense(x.shape[-1], sizes.output_std or sizes.init_std, self.dtype, sizes.biases, name="down")(y, held)
        y = x + dropout(y, sizes.dropout, site(noise, tag))
        return constrain(y if self.pre_norm else norm(y), "batch", axis, None)
