"""Sharding rules: which logical axis of an array is cut over which axes of the mesh.

Parameters are sharded over `fsdp` and gathered where they are used. Activations are sharded by rows, and over `tensor`
and `sequence` where devices share a layer's work.
"""

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipelines.errors import UserError
from models.core.parameters import Parameter, nest
from models.core.sharding import Axes, Rules

ROWS = ("slice", "data", "fsdp")  # the mesh axes that cut a batch

PARAMETER_AXES: Mapping[str, tuple[str, ...]] = {
    "layers": (),
    # The vocabulary rather than the width: an all-gather along the first axis needs no change of layout.
    "vocab": ("tensor", "fsdp"),
    "cluster": ("tensor", "fsdp"),
    "embedding": (),
    "position": (),
    "type": (),
    "label": (),
    "width": ("fsdp",),
    "inner": ("fsdp",),  # of blocks between bottlenecks
    "bottleneck": (),  # the same side of a matrix whose other side is the width
    "heads": ("tensor",),
    "feed_forward": ("tensor",),
}
ACTIVATION_AXES: Mapping[str, tuple[str, ...]] = {
    "batch": ROWS,
    "layers": ("fsdp",),  # of what is computed for each layer alone, by Muon
    "length": ("sequence",),
    "heads": ("tensor",),
    "feed_forward": ("tensor",),
    "vocab": ("tensor",),
}


def spec(axes: Axes, shape: tuple[int, ...], table: Mapping[str, tuple[str, ...]], mesh: Mesh) -> PartitionSpec:
    """Return how an array with these logical axes is sharded over the mesh.
    Raises ValueError for an axis without a rule, two axes on one mesh axis, or a size that does not divide evenly."""
    cuts, taken = [], set()
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in table:
            raise ValueError(f"no rule for the axis {axis!r}: add it to tpu/rules.py")
        over = tuple(name for name in table.get(axis, ()) if mesh.shape[name] > 1)
        if doubled := taken & set(over):
            raise ValueError(f"axes {axes}: two of them are cut over {', '.join(doubled)}")
        parts = math.prod(mesh.shape[name] for name in over)
        if size % parts:
            cut = " x ".join(f"{name}={mesh.shape[name]}" for name in over)
            raise ValueError(f"--mesh {cut} does not divide {axis}, which is {size}: choose divisors of it")
        taken |= set(over)
        cuts.append(over[0] if len(over) == 1 else over or None)
    return PartitionSpec(*cuts)


def parameter_shardings(table: list[Parameter], shapes: Mapping, mesh: Mesh) -> dict:
    """Return a NamedSharding for each parameter of a table, as a nested dict.

    shapes: a nested dict of arrays (or of shapes) with the table's paths.   Raises UserError if the mesh does not fit.
    """
    return nest({row.path: _parameter_sharding(row, _at(shapes, row.path).shape, mesh) for row in table})


def divisor_of_fsdp(table: list[Parameter], shapes: Mapping) -> int:
    """Return a number that the devices along `fsdp` must divide; 0 if any number fits. Arguments as in
    `parameter_shardings`."""
    sides = [zip(row.axes, _at(shapes, row.path).shape, strict=True) for row in table if _is_cut(row)]
    return math.gcd(*(size for row in sides for axis, size in row if "fsdp" in PARAMETER_AXES.get(axis, ())))


def _is_cut(row: Parameter) -> bool:
    """Return whether `fsdp` cuts a parameter: vectors are too small to be worth a gather each."""
    return len(row.layer_axes) >= 2


def _parameter_sharding(row: Parameter, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    rules = PARAMETER_AXES
    if not _is_cut(row):
        rules = {axis: tuple(name for name in over if name != "fsdp") for axis, over in rules.items()}
    try:
        return NamedSharding(mesh, spec(row.axes, shape, rules, mesh))
    except ValueError as error:
        raise UserError(f"{row.path}: {error}") from None


def _at(tree: Mapping, path: str):
    for key in path.split("/"):
        tree = tree[key]
    return tree


def activation_rules(mesh: Mesh) -> Rules | None:
    """Return the rules for a program's activations; None for a single device."""
    if mesh.size == 1:
        return None
    return Rules(mesh, lambda axes, shape: spec(axes, shape, ACTIVATION_AXES, mesh))


def shard_bytes(tree) -> int:
    """Return the bytes that one device holds of a tree of shapes with shardings."""

    def shard(leaf):
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(shard(leaf) for leaf in jax.tree.leaves(tree))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array whose first axis is cut like a batch."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def carry_shardings(axes, mesh: Mesh):
    """Return the shardings of a carry, whose leaves are cut along their 'batch' axis."""

    def cut(names):
        return NamedSharding(mesh, PartitionSpec(*(ROWS if name == "batch" else None for name in names)))

    return jax.tree.map(cut, axes, is_leaf=is_axes)


def is_axes(node) -> bool:
    """Return whether a node of a tree of axes is the axes of one array; a tuple of such tuples is not."""
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)
