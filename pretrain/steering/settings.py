"""How strongly a text is steered."""

import dataclasses

from data_pipelines.errors import UserError
from models.core.ranges import COUNT_OR_NONE, NOT_NEGATIVE, SHARE, Range, check_ranges

RANGES = {
    "step_size": NOT_NEGATIVE,
    "iterations": COUNT_OR_NONE,
    "gamma": Range("at least 0 and at most 2", lambda x: 0 <= x <= 2),  # above it float32 loses powers of small norms
    "window": COUNT_OR_NONE,
    "kl_scale": NOT_NEGATIVE,
    "fusion": SHARE,
}


@dataclasses.dataclass(frozen=True)
class Steering:
    """Strengths of Dathathri et al. 2020, with the defaults of its authors' program."""

    step_size: float = 0.02
    """Of each step along the gradient (alpha in equation 3)."""
    iterations: int = 3
    """Steps before each token."""
    gamma: float = 1.5
    """The power of its norm by which a layer's gradient is divided (equation 3)."""
    window: int = 0
    """Only the keys and values of so many last tokens are changed; 0 for all."""
    kl_scale: float = 0.01
    """Weight of the divergence from the next token's unsteered distribution."""
    fusion: float = 0.9
    """Share of the steered distribution in the geometric mean with the unsteered one (gamma_gm in section 3.3)."""

    def __post_init__(self):
        try:
            check_ranges(self, RANGES, "--steering.")
        except ValueError as error:
            raise UserError(str(error)) from None
