"""The device mesh: how many devices share a batch, a parameter, a layer's heads or a sequence."""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError

AXES = ("slice", "data", "fsdp", "sequence", "tensor")  # outermost, where the network is slowest, first
# Above 16 XLA:TPU reduces whole gradients of layers on every chip instead of their shares (seen on v5e 16x16).
MAX_FSDP = 16
STATE_BYTES = 16  # a parameter, its gradient and Adam's two moments, float32
# of a chip's memory; the rest is for activations
STATE_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis.

    slice: slices of TPUs, joined by the data-centre network; they share out the batch.
    data: share out the batch.   fsdp: share out the batch and the parameters with their optimiser state.
    sequence: share out each row's positions.   tensor: share out heads, feed-forward and vocabulary.
    """

    slice: int = 1
    data: int = 1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return math.prod(dataclasses.astuple(self))

    @property
    def batch_parts(self) -> int:
        """Into how many parts the rows of a batch are cut."""
        return self.slice * self.data * self.fsdp

    def __str__(self) -> str:
        cut = [f"{axis}={size}" for axis, size in dataclasses.asdict(self).items() if size > 1]
        return ",".join(cut) or "data=1"


def parse_mesh(text: str, devices: int, slices: int = 1) -> MeshShape:
    """'data=4,fsdp=2' -> MeshShape; `data` (and `slice`) may be left out and take what is left of the devices.

    UserError when an axis is unknown or the axes do not fill the devices.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            raise UserError(unknown("--mesh: unknown axis", axis, AXES))
        if not size.isdigit() or int(size) < 1:
            raise UserError(f"--mesh {text}: give {axis} a number of devices, like {axis}=2")
        if axis in sizes:
            raise UserError(f"--mesh {text}: {axis} is given twice")
        sizes[axis] = int(size)
    sizes.setdefault("slice", slices)
    rest = math.prod(sizes.values())
    if "data" not in sizes and devices % rest == 0:
        sizes["data"] = devices // rest
    shape = MeshShape(**sizes)
    if shape.size != devices:
        raise UserError(f"--mesh {text}: it takes {shape.size} devices, there are {devices}; change an axis")
    return shape


def automatic_mesh(devices: int, parameters: int, memory: float | None, slices: int = 1) -> MeshShape:
    """Data parallel, with as much fsdp as brings the training state of `parameters` scalars into a quarter of a chip.

    memory: bytes of a device, None when it does not matter (CPUs).   fsdp is a power of two and at most MAX_FSDP.
    """
    per_slice = devices // slices
    fsdp = 1
    while (
        memory is not None
        and STATE_BYTES * parameters / fsdp > STATE_SHARE * memory
        and fsdp < MAX_FSDP
        and per_slice % (2 * fsdp) == 0
    ):
        fsdp *= 2
    return MeshShape(slice=slices, data=per_slice // fsdp, fsdp=fsdp)


def make_mesh(shape: MeshShape, devices: list[jax.Device]) -> Mesh:
    """The mesh over devices, laid out along their interconnect; axes of one device are kept."""
    inner = dataclasses.astuple(shape)[1:]
    if devices[0].platform == "cpu":
        grid = np.array(devices).reshape(dataclasses.astuple(shape))
    elif shape.slice > 1:
        grid = mesh_utils.create_hybrid_device_mesh((1, *inner), (shape.slice, 1, 1, 1, 1), devices)
    else:
        grid = mesh_utils.create_device_mesh((1, *inner), devices, allow_split_physical_axes=True)
    return _named(grid)


def row_mesh(devices: list[jax.Device], batch_sizes: Collection[int]) -> Mesh:
    """Data parallel over the first of the devices, as many as divide each of the batch sizes.

    For what hardly uses the interconnect: their layout in it is not looked at.
    """
    number = max(n for n in range(1, len(devices) + 1) if not any(size % n for size in batch_sizes))
    return _named(np.array(devices[:number]).reshape(1, number, 1, 1, 1))


def _named(grid: np.ndarray) -> Mesh:
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def count_slices(devices: list[jax.Device]) -> int:
    """Slices that the devices belong to; 1 where the platform has none."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def choose_mesh(text: str | None, parameters: int, devices: list[jax.Device], memory: float | None) -> Mesh:
    """The mesh that --mesh asks for, or the automatic one."""
    if text is not None:
        return named_mesh(text, devices)
    return make_mesh(automatic_mesh(len(devices), parameters, memory, count_slices(devices)), devices)


def named_mesh(text: str, devices: list[jax.Device]) -> Mesh:
    """The mesh that --mesh asks for."""
    return make_mesh(parse_mesh(text, len(devices), count_slices(devices)), devices)


@contextlib.contextmanager
def divided_by(mesh: Mesh) -> Iterator[None]:
    """UserError for what is traced in this context and cannot be cut evenly over a mesh."""
    try:
        yield
    except ValueError as error:
        if mesh.size == 1:
            raise
        raise UserError(str(error)) from None


def mesh_shape(mesh: Mesh) -> MeshShape:
    """The shape of a mesh that `make_mesh` made."""
    return MeshShape(**mesh.shape)
