"""The device mesh: how many devices shard a batch, a parameter, a layer's heads or a sequence."""

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

AXES = ("slice", "data", "fsdp", "sequence", "tensor")  # the outermost, whose network is slowest, first
# Above 16, XLA:TPU reduces whole layer gradients on every chip instead of one shard each (seen on v5e 16x16).
MAX_FSDP = 16
STATE_BYTES = 16  # a parameter, its gradient and Adam's two moments, float32
# The share of a chip's memory for the training state; the rest is for activations. bert-large takes 0.32 of v5e's and
# fits with 16 rows of 512 tokens per chip (benchmarks/results/plans.md).
STATE_SHARE = 0.35
# From the plans in benchmarks/results/plans.md. USUAL_SHARE: the share of the peak FLOP/s that a step reaches, 0.5 to
# 0.75. UPDATE_BYTES: the time of the update, as bytes per scalar at HBM's nominal rate. (It moves 32 bytes, and casts
# and slices of parameters move some more, at half of that rate by XLA's cycles.)
USUAL_SHARE = 0.6
UPDATE_BYTES = 70
# The share of collectives that is waited for although they run inside of products:
NOT_BESIDE = 0.3  # whole sums, without sharded parameters; 0.17 to 0.6 in plans
PARTS_NOT_BESIDE = 0.4  # gathers and scattered sums; 0.39 to 0.42 in plans
# Parameters that fit unsharded are sharded only if that shortens a step by more: the estimate favoured it by up to 0.1.
WORTH_CUTTING = 0.1


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The number of devices along each axis of the mesh, and what the axis shards.

    slice: the batch, over TPU slices joined by the data-centre network.   data: the batch.
    fsdp: the batch, and parameters with their optimizer state.
    sequence: the positions of each row.   tensor: heads, feed-forward and vocabulary.
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
        """The number of parts into which the rows of a batch are cut."""
        return self.slice * self.data * self.fsdp

    def __str__(self) -> str:
        cut = [f"{axis}={size}" for axis, size in dataclasses.asdict(self).items() if size > 1]
        return ",".join(cut) or "data=1"


def parse_mesh(text: str, devices: int, slices: int = 1) -> MeshShape:
    """Parse 'data=4,fsdp=2'; without `data` it is all remaining devices, without `slice` the number of slices.
    Raises UserError if an axis is unknown or the axes do not use all devices."""
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
    """The work that a mesh is chosen for.

    parameters: trained scalars.   flops: of the model in one step, over all devices; 0 if unknown.
    memory: bytes of a device, None if they do not matter (CPUs).   chip: None if its links are unknown.
    divisor: a number that fsdp must divide, 0 for any fsdp.   beside: whether collectives run inside of products, see
    `estimated`.
    """

    parameters: int
    flops: float
    memory: float | None
    chip: Tpu | None
    divisor: int = 0
    beside: bool = False


UNKNOWN = Load(0, 0.0, None, None)


class Estimate(NamedTuple):
    """A rough estimate of one step.   state: bytes of the training state on a device, without activations.
    seconds: of the step, 0 if unknown.   collectives: the part of these seconds that waits for other devices."""

    state: float
    seconds: float
    collectives: float


def automatic_mesh(devices: int, load: Load, slices: int = 1) -> MeshShape:
    """Return the mesh with the shortest step, by `estimated`, among those whose training state takes at most 0.35 of a
    chip's memory.
    If none does, take the largest fsdp; if parameters fit unsharded and fsdp would hardly help, take fsdp=1. fsdp is a
    power of two and at most MAX_FSDP."""
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
    """Estimate a step on slices of `data` x `fsdp` in closed form; without time if the chip or the FLOPs are unknown.

    Each device updates its shard of the parameters, which only `fsdp` cuts. Along `data` and `slice`, gradients are
    summed in float32. Along `fsdp`, parameters are gathered twice in bfloat16, and each device gets its part of the
    sums, or all of them if `fsdp` spans a slice, because XLA:TPU then does not scatter sums. Only collectives that ride
    in products overlap with work: gathers, scattered sums, and, on a single slice without sharded parameters, whole
    sums. With several slices, each exchanges whole sums twice within itself.
    """
    local = load.parameters / shape.fsdp  # scalars of a device
    state = STATE_BYTES * local
    if load.chip is None or not load.flops:
        return Estimate(state, 0.0, 0.0)
    devices = shape.size // shape.slice
    remote = lambda parts: (parts - 1) / parts  # the share of an array that other devices hold

    def seconds(sent, parts):
        return sent * remote(parts) / _rate(parts, devices, load.chip)

    compute = load.flops / (shape.size * USUAL_SHARE * load.chip.peak_flops)
    update = UPDATE_BYTES * local / load.chip.hbm_bandwidth
    waited = PARTS_NOT_BESIDE if load.beside else 1
    gathers = waited * seconds(2 * 2 * load.parameters, shape.fsdp)
    of_parts = 2 * 4 if shape.fsdp == devices else waited * 4  # bytes per scalar of the sums that are waited for
    sums = 1.0
    if shape.fsdp == 1 and shape.slice > 1:
        sums = 2.0
    elif shape.fsdp == 1 and load.beside:
        sums = NOT_BESIDE
    inside = gathers + of_parts * seconds(load.parameters, shape.fsdp) + sums * seconds(8 * local, shape.data)
    between = 0.0
    if shape.slice > 1:
        between = 8 * local / shape.data * remote(shape.slice) / load.chip.slice_bandwidth
    return Estimate(state, compute + update + inside + between, inside + between)


def _rate(group: int, devices: int, chip: Tpu) -> float:
    """Return the bytes/s that each device of a group in a slice receives, over the links of the torus's axes that the
    group fills one after the other: rings if the slice closes them, a line along an axis that it fills in part."""
    link = LINK_SHARE * chip.ici_bandwidth / (2 * chip.axes)
    closed = devices // chip.per_chip >= chip.ring**chip.axes
    axes = chip.axes * math.log(group) / math.log(devices) if group > 1 else 1.0
    rings = math.floor(axes + 1e-9)
    return link * ((2 if closed else 1) * rings + (axes > rings + 1e-9))


def reason(shape: MeshShape, load: Load) -> str:
    """Return, in one line, why a mesh was chosen."""
    chosen, other = estimated(shape, load), dataclasses.replace(shape, data=shape.data * shape.fsdp, fsdp=1)
    reasons = []
    if chosen.seconds:
        reasons.append(f"about {100 * chosen.collectives / chosen.seconds:.0f}% of the step in collectives")
    if shape.fsdp > 1:
        needed = f"need {estimated(other, load).state / GIB:.1f} GiB a chip"
        reasons.append(f"{other} would {'be slower' if _fits(other, load) else needed}")
    return f"mesh {shape}: " + ("; ".join(reasons) or "every device has room for all parameters")


def make_mesh(shape: MeshShape, devices: list[jax.Device]) -> Mesh:
    """Make the mesh over devices, laid out along their interconnect; axes of size 1 are kept."""
    inner = dataclasses.astuple(shape)[1:]
    if devices[0].platform == "cpu":
        return _in_order(shape, devices)
    if shape.slice > 1:
        grid = mesh_utils.create_hybrid_device_mesh((1, *inner), (shape.slice, 1, 1, 1, 1), devices)
    else:
        grid = mesh_utils.create_device_mesh((1, *inner), devices, allow_split_physical_axes=True)
    return _named(grid)


def row_mesh(devices: list[jax.Device], batch_sizes: Collection[int]) -> Mesh:
    """Make a data-parallel mesh over the first devices, as many as divide all batch sizes.
    It ignores the devices' layout, for programs that hardly use the interconnect."""
    return _in_order(MeshShape(data=_dividing(len(devices), batch_sizes)), devices)


def reading_mesh(devices: list[jax.Device], batch_sizes: Collection[int], load: Load) -> Mesh:
    """Make the automatic mesh of the first devices, as many as divide all batch sizes, in their order."""
    return _in_order(automatic_mesh(_dividing(len(devices), batch_sizes), load), devices)


def _dividing(devices: int, batch_sizes: Collection[int]) -> int:
    return max(n for n in range(1, devices + 1) if not any(size % n for size in batch_sizes))


def _in_order(shape: MeshShape, devices: list[jax.Device]) -> Mesh:
    return _named(np.array(devices[: shape.size]).reshape(dataclasses.astuple(shape)))


def host_mesh() -> Mesh:
    """Make a mesh of this host's CPU, so that no chip holds all parameters; of one chip if JAX_PLATFORMS has no CPU."""
    try:
        host = jax.local_devices(backend="cpu")
    except RuntimeError:
        host = jax.local_devices()
    return row_mesh(host[:1], [1])


def _named(grid: np.ndarray) -> Mesh:
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def count_slices(devices: list[jax.Device]) -> int:
    """Return the number of slices of the devices; 1 if the platform has no slices."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def device_memory() -> int | None:
    """Return the memory in bytes of each of this process's devices; None if unknown, as on CPUs."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def load_on(devices: list, parameters: int, memory: float | None, flops: float = 0.0, divisor: int = 0) -> Load:
    """Return the load for these devices, with what is known of their kind."""
    kind = devices[0].device_kind
    return Load(parameters, flops, memory, tpu_of(kind), divisor, rides_in_products(kind))


def choose_mesh(text: str | None, devices: list[jax.Device], load: Load = UNKNOWN) -> Mesh:
    """Return the mesh that --mesh describes, or the automatic one."""
    if text is not None:
        return named_mesh(text, devices)
    return make_mesh(automatic_mesh(len(devices), load, count_slices(devices)), devices)


def named_mesh(text: str, devices: list[jax.Device]) -> Mesh:
    """Return the mesh that --mesh describes."""
    return make_mesh(parse_mesh(text, len(devices), count_slices(devices)), devices)


@contextlib.contextmanager
def divided_by(mesh: Mesh) -> Iterator[None]:
    """Turn errors in this context about arrays that the mesh does not divide evenly into UserErrors."""
    try:
        yield
    except ValueError as error:
        if mesh.size == 1:
            raise
        raise UserError(str(error)) from None


def mesh_shape(mesh: Mesh) -> MeshShape:
    """Return the shape of a mesh from `make_mesh`."""
    return MeshShape(**mesh.shape)
