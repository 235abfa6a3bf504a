"""A host builds the rows that its devices hold, and each device gets its own of them."""

import jax
import numpy as np

from tpu.batches import host_rows, place_rows
from tpu.mesh import row_mesh


def test_a_host_s_rows_need_not_be_neighbours(monkeypatch):
    mesh, mine = row_mesh(jax.local_devices()[:1], [1]), np.array([0, 1, 4, 5])
    of_two_devices = lambda shape, sharding, part: (shape, [part((slice(start, start + 2),)) for start in (0, 4)])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "make_array_from_callback", of_two_devices)
    shape, parts = place_rows({"tokens": 10 * mine[:, None]}, mine, 8, mesh)["tokens"]
    assert shape == (8, 1)
    np.testing.assert_array_equal(parts, [[[0], [10]], [[40], [50]]])


def test_one_host_holds_all_rows():
    np.testing.assert_array_equal(host_rows(row_mesh(jax.local_devices()[:1], [1]), 8), np.arange(8))
