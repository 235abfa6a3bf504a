"""Train large embedding tables by touching only the rows that a batch reads: tables whose `Parameter` has `ids`.

The rows and their optimizer state are gathered before the step and scattered back after it, in place if the state is
donated. Gradient, norm, decay and update cover only these rows, so that a step takes as long for a million rows as for
ten thousand. Adagrad is the same as with a dense gradient. Adam is lazy, like torch.optim.SparseAdam: a row that the
batch does not read keeps its value and its moments. Weight decay acts on a row whenever it is read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from models.core.parameters import Parameter, Params, leaves, nest
from models.core.sharding import constrain
from pretrain.objectives.objective import Batch


@partial(jax.tree_util.register_dataclass, data_fields=("ids", "rows"), meta_fields=("size",))
@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a table f[size, ...], which a model reads in place of the table: `rows[ids]` is `table[ids]`.

    ids: i32[n], indices of the rows, ascending; values of `size` or more mean no row.   rows: f[n, ...].
    """

    ids: Array
    rows: Array
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table."""
        return (self.size, *self.rows.shape[1:])

    def __getitem__(self, ids: Array) -> Array:
        """Look up rows i[...] -> f[..., ...]; NaN for a row that was not gathered."""
        ids = _counted(ids, self.size)
        place = jnp.searchsorted(self.ids, ids)
        present = self.ids.at[place].get(mode="fill", fill_value=-1) == ids
        place = jnp.where(present, place, len(self.ids))
        return self.rows.at[place].get(mode="fill", fill_value=jnp.nan)


class Read(NamedTuple):
    """The part of a train state that a batch reads.   state: (parameters, optimizer state), complete.   paths: the same
    tree, with each leaf the path of its parameter, or ''.   ids: path of a sparse table -> i32[n] as in `Rows`."""

    state: tuple[Params, optax.OptState]
    paths: Any
    ids: Mapping[str, Array]

    def gathered(self) -> tuple[Params, optax.OptState]:
        """Replace tables and their moments by the rows f[n, ...] that are read."""

        def gather(whole: Array, path: str) -> Array:
            if path not in self.ids:
                return whole
            rows = whole.at[self.ids[path]]
            return rows.get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True)

        return jax.tree.map(gather, self.state, self.paths)

    def in_tables(self, params: Params) -> Params:
        """Wrap gathered parameters in `Rows`, as a model reads them."""
        sizes = {path: len(whole) for path, whole in leaves(self.state[0])}
        flat = leaves(params)
        return nest({path: Rows(self.ids[path], x, sizes[path]) if path in self.ids else x for path, x in flat})

    def put_back(self, state: tuple[Params, optax.OptState]) -> tuple[Params, optax.OptState]:
        """Scatter rows, shaped like those of `gathered`, back into the complete state."""

        def scatter(new: Array, whole: Array, path: str) -> Array:
            if path not in self.ids:
                return new
            rows = whole.at[self.ids[path]]
            return rows.set(new, mode="drop", indices_are_sorted=True, unique_indices=True)

        return jax.tree.map(scatter, state, self.state, self.paths)


def rows_read(
    table: Sequence[Parameter],
    batch: Batch,
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: optax.OptState,
) -> Read:
    """Find the rows that the whole batch reads, over all microbatches.   table: parameters, some maybe frozen."""
    flat = dict(leaves(params))
    ids = {row.path: _ids(row, batch, len(flat[row.path])) for row in table if row.ids and row.path in flat}
    paths = nest({path: path for path in flat})
    of_moments = jax.tree.map(lambda _: "", opt_state)
    if ids:
        of_moments = optax.tree_utils.tree_map_params(optimizer, lambda _, path: path, of_moments, paths)
    return Read((params, opt_state), (paths, of_moments), ids)


def _ids(parameter: Parameter, batch: Batch, size: int) -> Array:
    """Compute `Rows.ids` i32[n]; n is the number of ids in the batch, but at most the table's size."""
    none = jnp.full(1, size)  # one id even if the batch has none of the arrays
    found = [none, *(_counted(batch[name], size).ravel() for name in parameter.ids if name in batch)]
    found = constrain(jnp.concatenate(found), None)
    ids = jnp.unique(found, size=min(len(found), size), fill_value=size)
    return jnp.where(ids < size, ids, size + jnp.arange(len(ids)))


def _counted(ids: Array, size: int) -> Array:
    """Normalize indices like `table[ids]`: negative ones count from the end, others are clipped to the table."""
    ids = jnp.asarray(ids).astype(jnp.int32)
    return jnp.clip(jnp.where(ids < 0, ids + size, ids), 0, size - 1)
