"""The memory of earlier tokens in Transformer-XL and XLNet."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array


class Memory(NamedTuple):
    """What a model remembers of the earlier tokens of each row.

    hidden: [depth, batch, memory, width], the inputs of each layer, oldest first, in the program's dtype.
    segments: i32[batch, memory], of those tokens; 0 for places that are still empty.
    """

    hidden: Array
    segments: Array


def empty_memory(model: nn.Module, rows: int, length: int | None = None) -> Memory:
    """Return an empty memory of a model, by default as long as in training."""
    c, length = model.config, model.config.memory if length is None else length
    hidden = jnp.zeros((c.depth, rows, length, c.width), model.program.compute)
    return Memory(hidden, jnp.zeros((rows, length), jnp.int32))


def remember(memory: Array, new: Array) -> Array:
    """Append new [batch, length, ...] to memory [batch, memory, ...] and keep as many of the latest as memory has."""
    both = jnp.concatenate([memory, new.astype(memory.dtype)], axis=1)
    return jax.lax.stop_gradient(both[:, both.shape[1] - memory.shape[1] :])
