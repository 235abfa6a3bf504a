"""What a model can record while it runs, in Flax collections: `module.apply(..., mutable=[HIDDEN])` returns it.

A stack of layers records what all of its layers do as one entry.

HIDDEN: [1 + depth, rows, length, width], the stack's input and each layer's output.
PROJECTED: (queries, keys, values) of each layer's attention, [depth, rows, length, heads, head_dim] each.
SHARES: the attention probabilities of each layer, [depth, rows, heads, queries, keys].
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

HIDDEN, PROJECTED, SHARES = COLLECTIONS = "hidden", "projected", "attention_shares"


def recorded(module: nn.Module) -> list[str]:
    """Return the collections that a module is asked to record."""
    return [name for name in COLLECTIONS if module.is_mutable_collection(name) and not module.is_initializing()]


def entries(found: Mapping[str, Any], collection: str) -> list[Any]:
    """Return what modules recorded in a collection, in the order of their names."""
    return [value for (value,) in jax.tree.leaves(found.get(collection, {}), is_leaf=lambda x: isinstance(x, tuple))]


def of_layers(found: Mapping[str, Any], collection: str) -> Any:
    """Return what all layers of a model recorded, of several stacks in the order of their names; None for nothing. The
    input of a further stack, which is the output of the one before, is left out."""
    stacks, skipped = entries(found, collection), int(collection == HIDDEN)
    join = lambda first, *others: jnp.concatenate([first, *(other[skipped:] for other in others)])
    return jax.tree.map(join, *stacks) if stacks else None


def states(found: Mapping[str, Any], last: Array) -> Array:
    """Return the recorded hidden states, the last as heads see it: behind a last norm, if the model has one."""
    return jnp.concatenate([of_layers(found, HIDDEN)[:-1], last[None]])
