"""The device mesh: which devices hold which rows of a batch."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def data_mesh() -> Mesh:
    """All devices in one axis, 'data': each takes a share of the rows and all hold the parameters."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The first axis cut over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def carry_shardings(axes, mesh: Mesh):
    """Each leaf of a carry cut over the devices along its 'batch' axis."""
    cut = lambda names: NamedSharding(mesh, PartitionSpec(*("data" if name == "batch" else None for name in names)))
    return jax.tree.map(cut, axes, is_leaf=lambda node: isinstance(node, tuple))
