"""Tables of which a step touches only the rows that its batch reads: those whose `Parameter` names `ids`.

The rows are gathered, with their moments, before the step and put back after it, in place where the state is donated;
gradient, norm, decay and update are of them alone, so that a step takes as long for a million rows as for ten thousand.
Adagrad is what it is with a dense gradient. Adam is lazy, as torch.optim.SparseAdam is: the moments of a row that no
batch reads do not decay, and it does not move. Weight decay acts on a row as often as it is read.
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
    """Some rows of a table f[size, ...], in its place where a model reads it: `rows[ids]` is `table[ids]`.

    ids: i32[n], which ones, ascending; numbers from `size` on are of no row.   rows: f[n, ...].
    """

    ids: Array
    rows: Array
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The table's."""
        return (self.size, *self.rows.shape[1:])

    def __getitem__(self, ids: Array) -> Array:
        """Of i[...] those rows f[..., ...]; NaN for one that is not here: no array of the batch had its number."""
        ids = _counted(ids, self.size)
        place = jnp.searchsorted(self.ids, ids)
        here = self.ids.at[place].get(mode="fill", fill_value=-1) == ids
        place = jnp.where(here, place, len(self.ids))
        return self.rows.at[place].get(mode="fill", fill_value=jnp.nan)


class Read(NamedTuple):
    """What a batch reads of a train state.

    state: (parameters, the optimiser's state), whole.   paths: the same, each leaf the path of the parameter that it
    is of, '' for none.   ids: path of a sparse table -> i32[n] as in `Rows`.
    """

    state: tuple[Params, optax.OptState]
    paths: Any
    ids: Mapping[str, Array]

    def gathered(self) -> tuple[Params, optax.OptState]:
        """The state with the rows f[n, ...] that are read in place of tables and their moments."""

        def gather(whole: Array, path: str) -> Array:
            if path not in self.ids:
                return whole
            rows = whole.at[self.ids[path]]
            return rows.get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True)

        return jax.tree.map(gather, self.state, self.paths)

    def in_tables(self, params: Params) -> Params:
        """Gathered parameters as a model reads them."""
        sizes = {path: len(whole) for path, whole in leaves(self.state[0])}
        flat = leaves(params)
        return nest({path: Rows(self.ids[path], x, sizes[path]) if path in self.ids else x for path, x in flat})

    def put_back(self, state: tuple[Params, optax.OptState]) -> tuple[Params, optax.OptState]:
        """The whole state with these rows, as `gathered` gave them."""

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
    """Of the whole batch, whatever microbatches it is cut into.   table: of parameters, which the phase may freeze."""
    flat = dict(leaves(params))
    ids = {row.path: _ids(row, batch, len(flat[row.path])) for row in table if row.ids and row.path in flat}
    paths = nest({path: path for path in flat})
    of_moments = jax.tree.map(lambda _: "", opt_state)
    if ids:
        of_moments = optax.tree_utils.tree_map_params(optimizer, lambda _, path: path, of_moments, paths)
    return Read((params, opt_state), (paths, of_moments), ids)


def _ids(parameter: Parameter, batch: Batch, size: int) -> Array:
    """i32[n] as in `Rows`, n as many as the batch has or, where that is less, the table."""
    none = jnp.full(1, size)  # so that there is an id where the batch has none of the arrays
    found = [none, *(_counted(batch[name], size).ravel() for name in parameter.ids if name in batch)]
    found = constrain(jnp.concatenate(found), None)
    ids = jnp.unique(found, size=min(len(found), size), fill_value=size)
    return jnp.where(ids < size, ids, size + jnp.arange(len(ids)))


def _counted(ids: Array, size: int) -> Array:
    """Rows of a table as `table[ids]` takes them: from its end where negative, its first or last for one beyond."""
    ids = jnp.asarray(ids).astype(jnp.int32)
    return jnp.clip(jnp.where(ids < 0, ids + size, ids), 0, size - 1)
