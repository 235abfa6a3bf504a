"""A stage of training: its shape, and what in it is otherwise than the recipe says."""

import dataclasses
from typing import Annotated, Any

from tyro.conf import Suppress

from pretrain.optimizers import Optimizer
from pretrain.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Task:
    """One of several things that a phase learns, each step one of them."""

    name: str  # before its figures
    objective: Any
    rate: float = 1.0  # how often it comes, beside the others
    corpus: str = ""  # the name of the one that it reads; all of them unless given


@dataclasses.dataclass(frozen=True)
class Phase:
    """BERT's first one is 90% of the steps at length 128, its second 10% at 512.

    An objective whose rows have further sizes, a target's length or images per row, has a subclass with fields for
    them (`Objective.phase`).
    """

    share: float  # of the run's steps
    length: int  # tokens per row
    batch_size: int  # rows per step, over all devices
    _: dataclasses.KW_ONLY
    objective: Annotated[Any, Suppress] = None  # the recipe's unless given, as of the next two
    optimizer: Annotated[Optimizer | None, Suppress] = None
    schedule: Annotated[Schedule | None, Suppress] = None  # over the steps of this phase alone
    frozen: tuple[str, ...] = ()  # what is not trained here, beside what the recipe freezes
    tasks: Annotated[tuple[Task, ...], Suppress] = ()  # in place of the objective

    def __str__(self) -> str:
        return f"{self.batch_size} rows of {self.length} tokens"
