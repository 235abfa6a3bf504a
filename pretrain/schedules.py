"""Learning rates as functions of the step."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from models.ranges import NOT_NEGATIVE, SHARE, check_ranges

NAMES = ("linear", "cosine", "inverse-sqrt", "warmup-stable-decay", "constant")
RANGES = {"peak": NOT_NEGATIVE, "warmup": SHARE, "final": SHARE, "decay": SHARE}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """peak: the highest learning rate.   warmup: share of the steps that rise linearly from 0 to it. Then

    linear: falls linearly to `final` x peak at the last step (Devlin et al. 2019).
    cosine: falls as half a cosine to `final` x peak (Loshchilov & Hutter 2017, equation 5).
    inverse-sqrt: peak x sqrt(warmup steps / step) (Vaswani et al. 2017, equation 3).
    warmup-stable-decay: stays at peak, then falls linearly to `final` x peak over the last `decay` share
        of the steps (Hu et al. 2024, arXiv:2404.06395).
    constant: stays at peak.
    """

    name: str = "linear"
    peak: float = 1e-4
    warmup: float = 0.01
    final: float = 0.0
    decay: float = 0.1

    def __post_init__(self):
        if self.name not in NAMES:
            raise ValueError(f"schedule.name={self.name!r}: use one of {', '.join(NAMES)}")
        check_ranges(self, RANGES, "schedule.")
        if self.warmup + self.decay > 1:
            raise ValueError(f"schedule.warmup={self.warmup}, decay={self.decay}: shares, together at most 1")

    @property
    def depends_on_total(self) -> bool:
        """Whether the rate at a step changes when the run is made longer."""
        return self.name not in ("constant", "inverse-sqrt") or self.warmup > 0


def learning_rate(schedule: Schedule, step: Array | int, steps: int) -> Array:
    """f32[] rate for the update number step + 1 of `steps`; step is 0-based."""
    update = jnp.asarray(step, jnp.float32) + 1.0
    warmup = max(1.0, round(schedule.warmup * steps))
    rise = jnp.minimum(update / warmup, 1.0)
    progress = jnp.clip((update - warmup) / max(1.0, steps - warmup), 0.0, 1.0)
    falls = {
        "linear": lambda: 1.0 - (1.0 - schedule.final) * progress,
        "cosine": lambda: schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
        "inverse-sqrt": lambda: jnp.sqrt(warmup / jnp.maximum(update, warmup)),
        "warmup-stable-decay": lambda: _stable_then_decay(schedule, update, steps),
        "constant": lambda: 1.0,
    }
    return (schedule.peak * rise * falls[schedule.name]()).astype(jnp.float32)


def _stable_then_decay(schedule: Schedule, update: Array, steps: int) -> Array:
    span = max(1.0, round(schedule.decay * steps))
    progress = jnp.clip((update - (steps - span)) / span, 0.0, 1.0)
    return 1.0 - (1.0 - schedule.final) * progress
