"""Parse which devices of a collective exchange with each other, in each of XLA's notations."""

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def groups(text: str, devices: int) -> Groups:
    """Parse the groups in a collective's attributes (pairs of source and target for a permutation), by default one
    group of all devices.
    `{{0,1},{2,3}}`, `[groups,size]<=[2,4]T(1,0)`, or axes of a mesh, `mesh['a'=2,'b'=4] {'b':(1)2}`: of b's 4 parts the
    2 that come after 1."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", text):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if shaped := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", text):
        return _rows(_iota(shaped[3], shaped[4]).reshape(int(shaped[1]), int(shaped[2])))
    if meshed := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))?\s*\{{([^}}]*)\}}", text):
        return _of_mesh(*meshed.groups())
    return (tuple(range(devices)),)


def _of_mesh(mesh: str, shape: str | None, order: str | None, named: str) -> Groups:
    """Return the groups along some axes, or parts of axes, of a mesh."""
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    ids = _iota(shape or str(math.prod(sizes.values())), order)
    parts = {axis: [size] for axis, size in sizes.items()}  # each axis cut into parts; devices exchange along one
    chosen = dict.fromkeys(sizes, -1)
    for axis, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named):
        before, part = int(before or 1), int(part or sizes[axis])
        parts[axis], chosen[axis] = [before, part, sizes[axis] // before // part], 1
    ids = ids.reshape([size for axis in sizes for size in parts[axis]])
    along, place = [], 0
    for axis in sizes:
        along += [place + chosen[axis]] if chosen[axis] >= 0 else []
        place += len(parts[axis])
    size = math.prod(ids.shape[place] for place in along)
    return _rows(np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, size))


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Return 0, 1, ... in a shape, transposed and flattened."""
    sides = [int(side) for side in shape.split(",")]
    ids = np.arange(math.prod(sides)).reshape(sides)
    return (ids.transpose([int(axis) for axis in order.split(",")]) if order else ids).reshape(-1)


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ids.tolist())
