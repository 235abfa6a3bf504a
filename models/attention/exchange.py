"""How a device reads other parts of its rows where a mesh shards their positions; whole rows are simply indexed.

Arrays are cut into blocks, [batch, heads, blocks, block, ...]; every device holds the same number of blocks. Each
function sends only what it returns, except `drawn`; gradients travel the same ways back.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.patterns.blocks import Blocks


class Part(NamedTuple):
    """A device's part of rows.   axis: the mesh axis that cuts rows into `parts`; None where rows are whole."""

    axis: str | None = None
    parts: int = 1

    def first(self, n: int) -> Array | int:
        """Return the index in the row of this part's first block (or token), where each part has n of them."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * n

    def places(self, numbers: tuple[int, ...], n: int) -> Array | np.ndarray:
        """Return the local index of the row's blocks with these numbers, in a part of n blocks; n (out of range) for
        blocks of other parts."""
        at = np.array(numbers, np.int32) - self.first(n)
        return at if self.axis is None else jnp.where((at >= 0) & (at < n), at, n)

    def cut(self, x: Array, n: int, extra: int = 0) -> Array:
        """Cut this part out of whole rows, x [batch, heads, blocks + extra, ...]: its n blocks and `extra` more."""
        return x if self.axis is None else jax.lax.dynamic_slice_in_dim(x, self.first(n), n + extra, axis=2)


WHOLE = Part()


def around(x: Array, before: int, after: int, part: Part) -> Array:
    """Extend x [batch, heads, n, ...] by blocks of the neighbouring parts -> [batch, heads, before + n + after, ...];
    zeros beyond the ends of the row."""
    if part.axis is None:
        return jnp.pad(x, [(0, 0), (0, 0), (before, after), *[(0, 0)] * (x.ndim - 3)])
    earlier = [_from(x, -away, size, part) for away, size in _neighbours(before, x.shape[2])]
    later = [_from(x, away, size, part) for away, size in _neighbours(after, x.shape[2])]
    return jnp.concatenate([*reversed(earlier), x, *later], axis=2)


def _neighbours(blocks: int, n: int) -> list[tuple[int, int]]:
    """Return (how many parts away, how many of its blocks are read) for each neighbour, the nearest first."""
    return [(1 + begin // n, min(n, blocks - begin)) for begin in range(0, blocks, n)]


def _from(x: Array, away: int, size: int, part: Part) -> Array:
    """Receive the nearest `size` blocks of the part that lies `away` parts after this one (before it, if negative)."""
    edge = x[:, :, :size] if away > 0 else x[:, :, x.shape[2] - size :]
    senders = [device for device in range(part.parts) if 0 <= device - away < part.parts]
    if not senders:
        return jnp.zeros_like(edge)
    return jax.lax.ppermute(edge, part.axis, [(device, device - away) for device in senders])


def blocks_at(x: Array, numbers: tuple[int, ...], part: Part) -> Array:
    """Return the row's blocks with these numbers: x [batch, heads, n, ...] -> [batch, heads, numbers, ...], the same on
    all devices of the row."""
    at = part.places(numbers, x.shape[2])
    if part.axis is None:
        return x[:, :, at]
    return _of_all(jnp.take(x, at, axis=2, mode="fill", fill_value=0), part)


def tokens_at(x: Array, positions: Array, part: Part) -> Array:
    """Return the row's tokens at positions i32[batch, g], zeros for -1: x [batch, heads, n, block, ...] ->
    [batch, heads, g, ...], the same on all devices of the row."""
    tokens = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    n = tokens.shape[2]
    at = positions - part.first(n)
    at = jnp.where((positions >= 0) & (at >= 0), at, n)
    taken = jax.vmap(lambda row, at: jnp.take(row, at, axis=1, mode="fill", fill_value=0))(tokens, at)
    return taken if part.axis is None else _of_all(taken, part)


def _of_all(x: Array, part: Part) -> Array:
    """Sum x, and in the backward pass its gradients, over the devices of a row; in float32, even if x is bfloat16."""
    return jax.lax.psum(x.astype(jnp.float32), part.axis).astype(x.dtype)


def drawn(x: Array, blocks: Blocks, part: Part) -> Array:
    """Return the blocks that `blocks.drawn` names for each block and head: x [batch, heads, n, block, ...] ->
    [batch, heads, n, drawn, block, ...]; an arbitrary block for -1.
    Devices receive whole rows, because the heads and blocks together name most of a row. Gradients are summed in x's
    dtype, as they are on a single device for a block that several others read."""
    x = x if part.axis is None else jax.lax.all_gather(x, part.axis, axis=2, tiled=True)
    units = x.reshape(x.shape[0], -1, *x.shape[3:])  # one head's blocks, then the next one's
    at = jnp.arange(x.shape[1])[:, None, None] * x.shape[2] + jnp.maximum(blocks.drawn, 0)
    return units.at[:, at].get(mode="promise_in_bounds")


def combined(top: Array, total: Array, mixed: Array, part: Part) -> tuple[Array, Array, Array]:
    """Combine the devices' partial softmax sums, each over its own keys, into the sums over all keys of the row.

    top: [..., 1], the largest score.   total: [..., 1], the sum of exp(score - top).   mixed: [..., head_dim], the sum
    of values with these weights.
    """
    if part.axis is None:
        return top, total, mixed
    most = jax.lax.pmax(jax.lax.stop_gradient(top), part.axis)
    weight = jnp.exp(top - most)
    return most, *jax.lax.psum((total * weight, mixed * weight), part.axis)
