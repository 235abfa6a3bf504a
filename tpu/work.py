"""A train step that is planned."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Work(NamedTuple):
    """A step to plan.

    step: jitted.   arguments: of it, shapes with shardings.   parts: 'parameters', 'optimizer', 'batch', ... -> the
    arguments' leaves that they name.   mesh, devices: its shape in words and its size.   rows: of a batch, a multiple
    of rows_multiple.   length: tokens per row.   model_flops: of one step, without recomputation, over all devices.
    checkpoint: bytes per device that writing a checkpoint takes beside the arguments, between two steps.
    places: of each device, its slice and then its coordinates.   ahead: batches that wait for their step on devices.
    evaluation: (the program, with `run`, `arguments` and `options`; bytes per device that lie beside it) where it may
    need more memory than a step.   options: XLA's that the step was jitted with.
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
