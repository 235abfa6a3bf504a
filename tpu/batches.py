"""Global batches; each host builds only the rows that its devices hold."""

from collections.abc import Mapping

import jax
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from tpu.rules import rows


def host_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Return the rows of a global batch that this process's devices hold, i64[n], ascending."""
    held = rows(mesh).addressable_devices_indices_map((batch_size,))
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in held.values()]))


def place_rows(batch: Mapping[str, np.ndarray], mine: np.ndarray, batch_size: int, mesh: Mesh) -> dict[str, Array]:
    """Turn this host's rows `mine` of a global batch, name -> [n, ...], into global arrays [batch_size, ...]."""
    sharding = rows(mesh)
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)

    def place(array: np.ndarray) -> Array:
        def part(index):
            return array[np.searchsorted(mine, np.arange(batch_size)[index[0]])]

        return jax.make_array_from_callback((batch_size, *array.shape[1:]), sharding, part)

    return {name: place(array) for name, array in batch.items()}


def on_host(array: Array) -> np.ndarray:
    """The whole of an array, on every host; all hosts ask together."""
    return np.asarray(array if array.is_fully_addressable else process_allgather(array, tiled=True))
