"""The memory of earlier tokens in Transformer-XL and XLNet."""

from typing import NamedTuple

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


def empty_memory(depth: int, batch: int, length: int, width: int, dtype) -> Memory:
    """Return an empty memory."""
    return Memory(jnp.zeros((depth, batch, length, width), dtype), jnp.zeros((batch, length), jnp.int32))


def remember(memory: Array, new: Array) -> Array:
    """Append new [batch, length, ...] to memory [batch, memory, ...] and keep as many of the latest as memory has."""
    both = jnp.concatenate([memory, new.astype(memory.dtype)], axis=1)
    return jax.lax.stop_gradient(both[:, both.shape[1] - memory.shape[1] :])
