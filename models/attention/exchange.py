"""What a device reads of its rows' other parts where a mesh cuts them; where rows are whole, the same by indexing.

Arrays are cut into blocks, [batch, heads, blocks, block, ...], of which a device has the same number as all others.
Each function sends what its name says and no more, but for `drawn`; gradients go the ways back.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.patterns.blocks import Blocks


class Part(NamedTuple):
    """A device's part of rows.   axis: of the mesh, that cuts rows into `parts`; None where they are whole."""

    axis: str | None = None
    parts: int = 1

    def first(self, n: int) -> Array | int:
        """The number in the row of a part's first block, or token, where parts have n of them."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * n

    def places(self, numbers: tuple[int, ...], n: int) -> Array | np.ndarray:
        """Where a part of n blocks has those of these numbers in the row: n for others', which is none."""
        at = np.array(numbers, np.int32) - self.first(n)
        return at if self.axis is None else jnp.where((at >= 0) & (at < n), at, n)

    def cut(self, x: Array, n: int, extra: int = 0) -> Array:
        """Of all blocks of rows, and `extra`, [batch, heads, blocks + extra, ...]: a part's n, and `extra`."""
        return x if self.axis is None else jax.lax.dynamic_slice_in_dim(x, self.first(n), n + extra, axis=2)


WHOLE = Part()


def around(x: Array, before: int, after: int, part: Part) -> Array:
    """x [batch, heads, n, ...] with so many blocks of the parts before and after: [batch, heads, before + n + after,
    ...]; zeros where the row has ended."""
    if part.axis is None:
        return jnp.pad(x, [(0, 0), (0, 0), (before, after), *[(0, 0)] * (x.ndim - 3)])
    earlier = [_from(x, -away, size, part) for away, size in _neighbours(before, x.shape[2])]
    later = [_from(x, away, size, part) for away, size in _neighbours(after, x.shape[2])]
    return jnp.concatenate([*reversed(earlier), x, *later], axis=2)


def _neighbours(blocks: int, n: int) -> list[tuple[int, int]]:
    """(how many parts away, blocks of it that are read), the nearest first."""
    return [(1 + begin // n, min(n, blocks - begin)) for begin in range(0, blocks, n)]


def _from(x: Array, away: int, size: int, part: Part) -> Array:
    """The `size` blocks next to this device's of the part that lies so many parts after it, or before it."""
    edge = x[:, :, :size] if away > 0 else x[:, :, x.shape[2] - size :]
    senders = [device for device in range(part.parts) if 0 <= device - away < part.parts]
    if not senders:
        return jnp.zeros_like(edge)
    return jax.lax.ppermute(edge, part.axis, [(device, device - away) for device in senders])


def blocks_at(x: Array, numbers: tuple[int, ...], part: Part) -> Array:
    """The row's blocks of these numbers: x [batch, heads, n, ...] -> [batch, heads, numbers, ...], alike on all its
    devices."""
    at = part.places(numbers, x.shape[2])
    if part.axis is None:
        return x[:, :, at]
    return _of_all(jnp.take(x, at, axis=2, mode="fill", fill_value=0), part)


def tokens_at(x: Array, positions: Array, part: Part) -> Array:
    """The row's tokens at positions i32[batch, g], zeros at -1: x [batch, heads, n, block, ...] -> [batch, heads, g,
    ...], alike on all its devices."""
    tokens = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    n = tokens.shape[2]
    at = positions - part.first(n)
    at = jnp.where((positions >= 0) & (at >= 0), at, n)
    taken = jax.vmap(lambda row, at: jnp.take(row, at, axis=1, mode="fill", fill_value=0))(tokens, at)
    return taken if part.axis is None else _of_all(taken, part)


def _of_all(x: Array, part: Part) -> Array:
    """The sum of x over a row's devices, and of its gradients from them; in float32, also where x is bfloat16."""
    return jax.lax.psum(x.astype(jnp.float32), part.axis).astype(x.dtype)


def drawn(x: Array, blocks: Blocks, part: Part) -> Array:
    """The row's blocks that a table names for each block and head: x [batch, heads, n, block, ...] -> [batch, heads, n,
    drawn, block, ...]; any where none is named.

    Devices get whole rows: what several heads and blocks name together is most of them. Gradients are added up in x's
    dtype, as those of a block that several read are on one device.
    """
    x = x if part.axis is None else jax.lax.all_gather(x, part.axis, axis=2, tiled=True)
    units = x.reshape(x.shape[0], -1, *x.shape[3:])  # one head's blocks, then the next one's
    at = jnp.arange(x.shape[1])[:, None, None] * x.shape[2] + jnp.maximum(blocks.drawn, 0)
    return units.at[:, at].get(mode="promise_in_bounds")


def combined(top: Array, total: Array, mixed: Array, part: Part) -> tuple[Array, Array, Array]:
    """A softmax's sums over all keys of the row, of which each device has those over its own.

    top: [..., 1], the largest score.   total: [..., 1], of exp(score - top).   mixed: [..., head_dim], of values by it.
    """
    if part.axis is None:
        return top, total, mixed
    most = jax.lax.pmax(jax.lax.stop_gradient(top), part.axis)
    weight = jnp.exp(top - most)
    return most, *jax.lax.psum((total * weight, mixed * weight), part.axis)
