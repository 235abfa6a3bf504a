"""What models with a memory remember of earlier tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Memory(NamedTuple):
    """What a model remembers of the rows' earlier tokens.

    hidden: [depth, batch, memory, width], the input of each layer, oldest first, in the program's dtype.
    segments: i32[batch, memory] of those tokens, 0 where there is none yet.
    """

    hidden: Array
    segments: Array


def empty_memory(depth: int, batch: int, length: int, width: int, dtype) -> Memory:
    """A memory of nothing."""
    return Memory(jnp.zeros((depth, batch, length, width), dtype), jnp.zeros((batch, length), jnp.int32))


def remember(memory: Array, new: Array) -> Array:
    """The latest of memory [batch, memory, ...] followed by new [batch, length, ...], as many as memory holds."""
    both = jnp.concatenate([memory, new.astype(memory.dtype)], axis=1)
    return jax.lax.stop_gradient(both[:, both.shape[1] - memory.shape[1] :])
