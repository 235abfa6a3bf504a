"""A stretch of training at one shape."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Phase:
    """BERT's first one is 90% of the steps at length 128, its second 10% at 512.

    An objective whose rows have further sizes, a target's length or images per row, has a subclass with fields for
    them (`Objective.phase`).
    """

    share: float  # of the run's steps
    length: int  # tokens per row
    batch_size: int  # rows per step, over all devices

    def __str__(self) -> str:
        return f"{self.batch_size} rows of {self.length} tokens"
