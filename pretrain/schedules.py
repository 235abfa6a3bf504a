"""Learning rates as functions of the step."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from models.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, check_ranges

NAMES = ("linear", "cosine", "polynomial", "inverse-sqrt", "flat-inverse-sqrt", "warmup-stable-decay", "constant")
RANGES = {"peak": NOT_NEGATIVE, "warmup": SHARE, "final": SHARE, "decay": SHARE, "power": POSITIVE}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """linear: falls linearly to `final` x peak at the last step (Devlin et al. 2019).

    cosine: falls as half a cosine to `final` x peak (Loshchilov & Hutter 2017, equation 5).

    polynomial: falls to `final` x peak as the share of the steps that is left, to a `power` (Beltagy et al. 2020).

    inverse-sqrt: peak x sqrt(warmup steps / step) (Vaswani et al. 2017, equation 3).

    flat-inverse-sqrt: the same, at peak from the first step on (Raffel et al. 2020, section 3.1.2).

    warmup-stable-decay: stays at peak, then falls linearly to `final` x peak over the last `decay` share of the steps
    (Hu et al. 2024, arXiv:2404.06395).

    constant: stays at peak.
    """

    name: str = "linear"  # how the rate goes on after warmup, one of those above
    peak: float = 1e-4  # the highest learning rate
    warmup: float = 0.01  # share of the steps in which it rises linearly from 0 to the peak
    final: float = 0.0  # share of the peak that is left at the last step
    decay: float = 0.1  # share of the steps, the last ones, in which warmup-stable-decay falls
    power: float = 3.0  # to which polynomial takes the share of the steps that is left
    steps: int | None = None  # that it is planned for, by default all; then the rate stays, but inverse-sqrt falls on

    def __post_init__(self):
        if self.name not in NAMES:
            raise ValueError(f"schedule.name={self.name!r}: use one of {', '.join(NAMES)}")
        check_ranges(self, RANGES | ({} if self.steps is None else {"steps": COUNT}), "schedule.")
        if self.name == "warmup-stable-decay" and self.warmup + self.decay > 1:
            raise ValueError(f"schedule.warmup={self.warmup}, decay={self.decay}: shares, together at most 1")


class Numbers(NamedTuple):
    """A schedule's numbers, f32[] each: arguments of a compiled step, which so serves all runs of one kind.

    begin: steps of the run before the schedule's first.   warmup: updates.   falls_after: the updates before the rate
    falls, over so many as `fall` says.   final: what is left then of the peak, and `lost` what is not.
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
    """Of a schedule over so many steps, from step `begin` of a run on."""
    steps = schedule.steps or steps
    warmup = max(1, round(schedule.warmup * steps))
    falls_after, fall = warmup, max(1, steps - warmup)
    if schedule.name == "warmup-stable-decay":
        fall = max(1, round(schedule.decay * steps))
        falls_after = steps - fall
    of = (schedule.peak, begin, warmup, falls_after, fall, schedule.final, 1.0 - schedule.final, schedule.power)
    return Numbers(*map(np.float32, of))


def learning_rate(name: str, of: Numbers, step: Array | int) -> Array:
    """f32[] rate of the update after `step` steps, by a schedule of this name."""
    update = jnp.asarray(step, jnp.float32) + 1.0 - of.begin
    progress = jnp.clip((update - of.falls_after) / of.fall, 0.0, 1.0)
    falling_root = jnp.sqrt(of.warmup / jnp.maximum(update, of.warmup))
    left = {
        "linear": lambda: 1.0 - of.lost * progress,
        "cosine": lambda: of.final + of.lost * 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
        "polynomial": lambda: of.final + of.lost * (1.0 - progress) ** of.power,
        "inverse-sqrt": lambda: falling_root,
        "flat-inverse-sqrt": lambda: falling_root,
        "warmup-stable-decay": lambda: 1.0 - of.lost * progress,
        "constant": lambda: 1.0,
    }
    rise = 1.0 if name == "flat-inverse-sqrt" else jnp.minimum(update / of.warmup, 1.0)
    return (of.peak * rise * left[name]()).astype(jnp.float32)
