"""Which drawn blocks devices send each other where a mesh cuts rows: tables made on the host, by NumPy."""

import dataclasses

import jax
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """Of one layer; of all layers with [depth] before each array. A unit is one head's block.

    send: i32[groups of heads, devices, devices, n], the units that a device of a group sends to each device, itself
    included: (head of the group) * (blocks of a part) + block of the part; as many of all layers, so that shapes are
    alike, what is too much repeats unit 0.
    place: i32[heads, query blocks, drawn], where the device of a query block finds each of its drawn blocks among the
    units that it received, [devices, n] one after the other; 0 where none is drawn.
    """

    send: Array | np.ndarray
    place: Array | np.ndarray


def routes(drawn: np.ndarray, heads: int, parts: int, groups: int) -> Routes:
    """drawn: i32[depth, heads or 1, query blocks, n], -1 for none.   parts: of a row.   groups: of heads."""
    depth, _, number, _ = drawn.shape
    drawn = np.broadcast_to(drawn, (depth, heads, *drawn.shape[2:]))
    own, of_group = number // parts, heads // groups
    layer, head, row, _ = np.indices(drawn.shape)
    reader, sender = row // own, drawn // own
    unit = head % of_group * own + drawn % own
    # One number for each unit that a device asks another for: what is asked for twice is sent once.
    sizes = (depth, groups, parts, parts, of_group * own)
    at = np.ravel_multi_index((layer, head // of_group, sender, reader, unit), sizes, mode="clip")
    asked, inverse = np.unique(at[drawn >= 0], return_inverse=True)
    line, units = np.divmod(asked, sizes[-1])  # line: (layer, group, sender, reader)
    index = np.arange(len(asked)) - np.searchsorted(line, line)
    most = int(index.max(initial=0)) + 1
    send = np.zeros((*sizes[:-1], most), np.int32)
    send.reshape(-1, most)[line, index] = units
    place = np.zeros(drawn.shape, np.int32)
    place[drawn >= 0] = (sender[drawn >= 0] * most) + index[inverse]
    return Routes(send, place)
