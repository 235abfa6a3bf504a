"""Learning rates as functions of the step."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from models.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, check_choices, check_ranges

NAMES = ("linear", "cosine", "polynomial", "one-minus-sqrt", "inverse-sqrt", "flat-inverse-sqrt")
NAMES += ("warmup-stable-decay", "constant")
RANGES = {"peak": NOT_NEGATIVE, "warmup": SHARE, "final": SHARE, "decay": SHARE, "power": POSITIVE}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """linear: falls linearly to `final` x peak at the last step (Devlin et al. 2019).

    cosine: falls along half a cosine to `final` x peak (Loshchilov & Hutter 2017, equation 5).

    polynomial: falls to `final` x peak with the share of steps left to the power of `power` (Beltagy et al. 2020).

    one-minus-sqrt: falls to `final` x peak with 1 minus the square root of the share of steps done (Hägele et al. 2024,
    arXiv:2405.18392, section 4).

    inverse-sqrt: peak x sqrt(warmup steps / step) (Vaswani et al. 2017, equation 3).

    flat-inverse-sqrt: the same, but at peak instead of warmup (Raffel et al. 2020, section 3.1.2).

    warmup-stable-decay: stays at peak, then falls linearly to `final` x peak over the last `decay` share of the steps
    (Hu et al. 2024, arXiv:2404.06395).

    constant: stays at peak.
    """

    name: str = "linear"  # shape after warmup, one of those above
    peak: float = 1e-4  # the highest learning rate
    warmup: float = 0.01  # share of the steps in which the rate rises linearly from 0 to the peak
    final: float = 0.0  # learning rate at the last step, as a share of the peak
    decay: float = 0.1  # warmup-stable-decay: share of the steps, at the end, in which the rate falls
    power: float = 3.0  # polynomial: exponent
    steps: int | None = None  # schedule length, by default all; then the rate is constant (inverse-sqrt: still falls)

    def __post_init__(self):
        check_choices(self, {"name": NAMES}, "schedule.")
        check_ranges(self, RANGES | ({} if self.steps is None else {"steps": COUNT}), "schedule.")
        if self.name == "warmup-stable-decay" and self.warmup + self.decay > 1:
            raise ValueError(f"schedule.warmup={self.warmup}, decay={self.decay}: together more than 1; lower one")


class Numbers(NamedTuple):
    """A schedule's numbers, f32[] each, as arguments of a compiled step, so that changing them needs no new program.

    begin: step of the run at which the schedule starts.   warmup: updates of warmup.   falls_after: updates before the
    rate falls.   fall: updates in which it falls.   final: rate at the end, as a share of the peak; lost: 1 - final.
    """

    peak: np.float32
    begin: np.float32
    warmup: np.float32
    falls_after: np.float32
    fall: np.float32
    final: np.float32
    lost: np.float32
    power: np.float32


def numbers(schedule: Schedule, steps: int, begin: int = 0) -> Numbers:
    """Compute the numbers of a schedule over `steps` steps that starts at step `begin` of a run."""
    steps = schedule.steps or steps
    warmup = max(1, round(schedule.warmup * steps))
    falls_after, fall = warmup, max(1, steps - warmup)
    if schedule.name == "warmup-stable-decay":
        fall = max(1, round(schedule.decay * steps))
        falls_after = steps - fall
    values = (schedule.peak, begin, warmup, falls_after, fall, schedule.final, 1.0 - schedule.final, schedule.power)
    return Numbers(*map(np.float32, values))


def learning_rate(name: str, schedule: Numbers, step: Array | int) -> Array:
    """Compute the learning rate f32[] of the update that follows `step` steps."""
    update = jnp.asarray(step, jnp.float32) + 1.0 - schedule.begin
    progress = jnp.clip((update - schedule.falls_after) / schedule.fall, 0.0, 1.0)
    falling_root = jnp.sqrt(schedule.warmup / jnp.maximum(update, schedule.warmup))
    left = {
        "linear": lambda: 1.0 - schedule.lost * progress,
        "cosine": lambda: schedule.final + schedule.lost * 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
        "polynomial": lambda: schedule.final + schedule.lost * (1.0 - progress) ** schedule.power,
        "one-minus-sqrt": lambda: 1.0 - schedule.lost * jnp.sqrt(progress),
        "inverse-sqrt": lambda: falling_root,
        "flat-inverse-sqrt": lambda: falling_root,
        "warmup-stable-decay": lambda: 1.0 - schedule.lost * progress,
        "constant": lambda: 1.0,
    }
    rise = 1.0 if name == "flat-inverse-sqrt" else jnp.minimum(update / schedule.warmup, 1.0)
    return (schedule.peak * rise * left[name]()).astype(jnp.float32)
