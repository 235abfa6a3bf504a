"""Gathering and writing chosen positions of rows."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from models.core.sharding import constrain, current_rules


def gather_positions(x: Array, positions: Array) -> Array:
    """Gather x [batch, length, ...] at positions i32[batch, n] -> [batch, n, ...].
    On a mesh each device reads its own rows. If rows are cut, it reads its own part, and the parts are summed."""
    rules = current_rules()
    if rules is None:
        return _take(x, positions)
    rows, cut = rules.spec(("batch", "length"), x.shape[:2])
    manual = {axis for over in (rows, cut) for axis in (over if isinstance(over, tuple) else (over,))} - {None}

    def of_part(x: Array, positions: Array) -> Array:
        if cut is None:
            return _take(x, positions)
        at = positions - jax.lax.axis_index(cut) * x.shape[1]
        inside = jnp.expand_dims((at >= 0) & (at < x.shape[1]), tuple(range(2, x.ndim)))
        return jax.lax.psum(jnp.where(inside, _take(x, at), 0), cut)

    # The compiler handles the other axes of the mesh: heads side by side in x's last axis stay as they are.
    take, specs = _take, (PartitionSpec(rows, cut), PartitionSpec(rows))
    if manual:
        take = jax.shard_map(of_part, mesh=rules.mesh, in_specs=specs, out_specs=specs[1], axis_names=manual)
    return constrain(take(x, positions), "batch", *(None,) * (x.ndim - 1))


def put_positions(x: Array, values: Array, positions: Array, slots: Array | None = None) -> Array:
    """Write values [batch, n, width] into x [batch, length, width] at positions i32[batch, n]; -1 writes nothing.
    slots: i32[batch, length], the positions of x's vectors in the row; by default 0, 1, 2, ...
    This is a product with ones and zeros, so that each device of a mesh writes its own rows."""
    slots = jnp.arange(x.shape[1])[None] if slots is None else slots
    matches = positions[:, :, None] == slots[:, None, :]  # [batch, n, length]
    put = jnp.einsum("bnl,bnw->blw", matches.astype(x.dtype), values, precision="highest").astype(x.dtype)
    return jnp.where(matches.any(1)[..., None], put, x)


def _take(x: Array, positions: Array) -> Array:
    return jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(x, positions)
