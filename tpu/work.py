"""The description of a train step to plan."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Work(NamedTuple):
    """A step to plan.

    step: the jitted function.   arguments: shapes with shardings.   parts: 'parameters', 'optimizer', 'batch', ... ->
    their leaves of the arguments.   mesh, devices: the mesh's shape in words and its size.   rows: of a batch, a
    multiple of rows_multiple.   length: tokens per row.   model_flops: of one step, without recomputation, over all
    devices.   checkpoint: bytes per device, besides the arguments, for writing a checkpoint between two steps.
    places: (slice, *coordinates) of each device.   ahead: batches that wait for their step on devices.
    evaluation: (the program, with `run`, `arguments` and `options`; bytes per device besides it) if it may need more
    memory than a step.   options: XLA options that the step was jitted with.
    """

    step: Any
    arguments: tuple
    parts: Mapping[str, Any]
    mesh: str
    devices: int
    rows: int
    rows_multiple: int
    length: int
    model_flops: float
    checkpoint: int
    places: tuple[tuple[int, ...], ...] = ()
    ahead: int = 0
    evaluation: tuple[Any, int] | None = None
    options: Mapping[str, str | bool] = MappingProxyType({})
