"""The device mesh: how many devices share a batch, a parameter, a layer's heads or a sequence."""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from tpu.generations import GIB, Tpu, tpu_of
from tpu.network import LINK_SHARE
from tpu.xla import rides_in_products

AXES = ("slice", "data", "fsdp", "sequence", "tensor")  # outermost, where the network is slowest, first
# Above 16 XLA:TPU reduces whole gradients of layers on every chip instead of their shares (seen on v5e 16x16).
MAX_FSDP = 16
STATE_BYTES = 16  # a parameter, its gradient and Adam's two moments, float32
# Of a chip's memory; the rest is for activations. bert-large takes 0.32 of v5e's and fits with 16 rows of 512 a chip
# (benchmarks/results/plans.md).
STATE_SHARE = 0.35
# By the plans in benchmarks/results/plans.md: of the peak what a step's FLOPs get of the cores, 0.5 to 0.75, and what
# the update takes beside that, as bytes at HBM's nominal rate for each scalar. (It moves 32 bytes, and what casts and
# slices parameters some more, at half of that rate by XLA's cycles.)
USUAL_SHARE = 0.6
UPDATE_BYTES = 70
NOT_BESIDE = 0.3  # of sums that ride in products, where nothing is cut; 0.17 to 0.6 in plans
PARTS_NOT_BESIDE = 0.4  # of gathers and scattered sums, where they ride; 0.39 to 0.42
# Parameters that need no cut are cut where that shortens a step by more; the estimate favoured it by up to a tenth.
WORTH_CUTTING = 0.1


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


class Load(NamedTuple):
    """What a mesh is chosen for.

    parameters: scalars that are trained.   flops: of the model in one step, over all devices; 0 where nobody counted.
    memory: bytes of a device, None when it does not matter (CPUs).   chip: None where its links are not known.
    divisor: what fsdp has to divide, 0 where it may be any number.   beside: whether collectives ride in products,
    as `estimated` has it.
    """

    parameters: int
    flops: float
    memory: float | None
    chip: Tpu | None
    divisor: int = 0
    beside: bool = False


UNKNOWN = Load(0, 0.0, None, None)


class Estimate(NamedTuple):
    """Of one step, roughly.   state: bytes of a device, without activations.   seconds: of the step, 0 where they are
    not known.   collectives: those of them that wait for other devices."""

    state: float
    seconds: float
    collectives: float


def automatic_mesh(devices: int, load: Load, slices: int = 1) -> MeshShape:
    """The mesh of the shortest step, by `estimated`, of those whose training state takes at most 0.35 of a chip.

    Where none does, that with the most fsdp; where parameters need no cut and it would hardly help, that without.
    fsdp is a power of two and at most MAX_FSDP.
    """
    shapes = _candidates(devices, slices, load.divisor)
    seconds = {shape: estimated(shape, load).seconds for shape in shapes if _fits(shape, load)}
    if not seconds:
        return shapes[-1]
    best = min(seconds, key=seconds.__getitem__)
    return shapes[0] if seconds.get(shapes[0], math.inf) <= (1 + WORTH_CUTTING) * seconds[best] else best


def _candidates(devices: int, slices: int, divisor: int) -> list[MeshShape]:
    per_slice, sizes = devices // slices, [1]
    while sizes[-1] < MAX_FSDP and math.gcd(per_slice, divisor) % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    return [MeshShape(slice=slices, data=per_slice // fsdp, fsdp=fsdp) for fsdp in sizes]


def _fits(shape: MeshShape, load: Load) -> bool:
    return load.memory is None or estimated(shape, load).state <= STATE_SHARE * load.memory


def estimated(shape: MeshShape, load: Load) -> Estimate:
    """A step on slices of `data` x `fsdp` in closed form; no time where the chip or the FLOPs are not known.

    Each device updates its share of the parameters, cut by `fsdp` alone. Along `data` and `slice` gradients are summed
    in float32; along `fsdp` parameters are gathered twice in bfloat16 and of the sums each device gets its part, or all
    where `fsdp` is a whole slice, whose sums XLA:TPU does not scatter. Nothing runs beside but what rides in products:
    gathers, scattered sums, and whole sums where nothing is cut and there is one slice. Of several slices each
    exchanges whole sums twice within itself.
    """
    whole = load.parameters / shape.fsdp  # scalars
    state = STATE_BYTES * whole
    if load.chip is None or not load.flops:
        return Estimate(state, 0.0, 0.0)
    devices = shape.size // shape.slice
    of_others = lambda parts: (parts - 1) / parts

    def seconds(sent, parts):
        return sent * of_others(parts) / _rate(parts, devices, load.chip)

    compute = load.flops / (shape.size * USUAL_SHARE * load.chip.peak_flops)
    update = UPDATE_BYTES * whole / load.chip.hbm_bandwidth
    waited = PARTS_NOT_BESIDE if load.beside else 1
    gathers = waited * seconds(2 * 2 * load.parameters, shape.fsdp)
    of_parts = 2 * 4 if shape.fsdp == devices else waited * 4  # bytes of a scalar's sum that are waited for
    sums = 1.0
    if shape.fsdp == 1 and shape.slice > 1:
        sums = 2.0
    elif shape.fsdp == 1 and load.beside:
        sums = NOT_BESIDE
    inside = gathers + of_parts * seconds(load.parameters, shape.fsdp) + sums * seconds(8 * whole, shape.data)
    between = 0.0
    if shape.slice > 1:
        between = 8 * whole / shape.data * of_others(shape.slice) / load.chip.slice_bandwidth
    return Estimate(state, compute + update + inside + between, inside + between)


def _rate(group: int, devices: int, chip: Tpu) -> float:
    """Bytes/s that each of a group of a slice's devices receives over the links of the torus's axes that the group
    takes, one after the other: rings where the slice closes them, a line along an axis that it takes a part of."""
    link = LINK_SHARE * chip.ici_bandwidth / (2 * chip.axes)
    closed = devices // chip.per_chip >= chip.ring**chip.axes
    axes = chip.axes * math.log(group) / math.log(devices) if group > 1 else 1.0
    rings = math.floor(axes + 1e-9)
    return link * ((2 if closed else 1) * rings + (axes > rings + 1e-9))


def reason(shape: MeshShape, load: Load) -> str:
    """Why a mesh was chosen, in one line."""
    found, other = estimated(shape, load), dataclasses.replace(shape, data=shape.data * shape.fsdp, fsdp=1)
    said = [f"about {100 * found.collectives / found.seconds:.0f}% of the step in collectives"] if found.seconds else []
    if shape.fsdp > 1:
        needed = f"need {estimated(other, load).state / GIB:.1f} GiB a chip"
        said.append(f"{other} would {'be slower' if _fits(other, load) else needed}")
    return f"mesh {shape}: " + ("; ".join(said) or "every device has room for all parameters")


def make_mesh(shape: MeshShape, devices: list[jax.Device]) -> Mesh:
    """The mesh over devices, laid out along their interconnect; axes of one device are kept."""
    inner = dataclasses.astuple(shape)[1:]
    if devices[0].platform == "cpu":
        return _in_order(shape, devices)
    if shape.slice > 1:
        grid = mesh_utils.create_hybrid_device_mesh((1, *inner), (shape.slice, 1, 1, 1, 1), devices)
    else:
        grid = mesh_utils.create_device_mesh((1, *inner), devices, allow_split_physical_axes=True)
    return _named(grid)


def row_mesh(devices: list[jax.Device], batch_sizes: Collection[int]) -> Mesh:
    """Data parallel over the first of the devices, as many as divide each of the batch sizes.

    For what hardly uses the interconnect: their layout in it is not looked at.
    """
    return _in_order(MeshShape(data=_dividing(len(devices), batch_sizes)), devices)


def reading_mesh(devices: list[jax.Device], batch_sizes: Collection[int], load: Load) -> Mesh:
    """The automatic mesh of the first of the devices, as many as divide each of the batch sizes, in their order."""
    return _in_order(automatic_mesh(_dividing(len(devices), batch_sizes), load), devices)


def _dividing(devices: int, batch_sizes: Collection[int]) -> int:
    return max(n for n in range(1, devices + 1) if not any(size % n for size in batch_sizes))


def _in_order(shape: MeshShape, devices: list[jax.Device]) -> Mesh:
    return _named(np.array(devices[: shape.size]).reshape(dataclasses.astuple(shape)))


def host_mesh() -> Mesh:
    """This host's memory as a device, so that no chip has to hold all parameters; where JAX was told to leave CPUs
    alone (JAX_PLATFORMS), one chip."""
    try:
        host = jax.local_devices(backend="cpu")
    except RuntimeError:
        host = jax.local_devices()
    return row_mesh(host[:1], [1])


def _named(grid: np.ndarray) -> Mesh:
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def count_slices(devices: list[jax.Device]) -> int:
    """Slices that the devices belong to; 1 where the platform has none."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def device_memory() -> int | None:
    """Bytes of each of this process's devices; None where that is not known, as on CPUs."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def load_on(
    devices: list[jax.Device], parameters: int, memory: float | None, flops: float = 0.0, divisor: int = 0
) -> Load:
    """What the devices will have to do."""
    kind = devices[0].device_kind
    return Load(parameters, flops, memory, tpu_of(kind), divisor, rides_in_products(kind))


def choose_mesh(text: str | None, devices: list[jax.Device], load: Load = UNKNOWN) -> Mesh:
    """The mesh that --mesh asks for, or the automatic one."""
    if text is not None:
        return named_mesh(text, devices)
    return make_mesh(automatic_mesh(len(devices), load, count_slices(devices)), devices)


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
