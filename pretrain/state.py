"""What training changes."""

from typing import Any, NamedTuple

import optax
from jax import Array

from models.core.parameters import Params


class TrainState(NamedTuple):
    """Everything that a step changes; checkpoints hold exactly this.

    step: i32[] batches seen.   carry: the objective's state between batches.
    skipped: i32[2], updates skipped for a non-finite loss or gradient: in all, and in a row up to now.
    """

    step: Array
    params: Params
    opt_state: optax.OptState
    carry: Any
    skipped: Array
