"""Learning rates as functions of the step."""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
from jax import Array
from tyro.conf import Suppress

from models.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, check_ranges

NAMES = ("linear", "cosine", "polynomial", "inverse-sqrt", "warmup-stable-decay", "constant")
RANGES = {"peak": NOT_NEGATIVE, "warmup": SHARE, "final": SHARE, "decay": SHARE, "power": POSITIVE}

ONWARD = ("constant", "decay")
LEAST = 0.1  # of the peak: what a run goes on with at least, since a schedule that ended at 0 would learn nothing


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Steps that a run was given later: from step `since` on, at `rate` or falling from it, as `kind` says.

    before: how many steps the run had in all until then.
    """

    kind: str
    since: int
    before: int
    rate: float

    def __post_init__(self):
        _check_onward(self.kind, "schedule.stretches: kind")
        check_ranges(self, {"since": COUNT, "before": COUNT, "rate": NOT_NEGATIVE}, "schedule.stretches: ")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """linear: falls linearly to `final` x peak at the last step (Devlin et al. 2019).

    cosine: falls as half a cosine to `final` x peak (Loshchilov & Hutter 2017, equation 5).

    polynomial: falls to `final` x peak as the share of the steps that is left, to a `power` (Beltagy et al. 2020).

    inverse-sqrt: peak x sqrt(warmup steps / step) (Vaswani et al. 2017, equation 3).

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
    from_here: str | None = None
    """With more steps, the schedule is evaluated for the new total, and the rate may rise again. Not so with constant,
    which holds the rate of the last step done, nor with decay, which falls linearly from there to final x peak at the
    new last step. Both go on with a tenth of the peak where the rate was lower."""
    stretches: Annotated[tuple[Stretch, ...], Suppress] = ()  # where that has been done; the run writes it

    def __post_init__(self):
        if self.name not in NAMES:
            raise ValueError(f"schedule.name={self.name!r}: use one of {', '.join(NAMES)}")
        check_ranges(self, RANGES, "schedule.")
        if self.name == "warmup-stable-decay" and self.warmup + self.decay > 1:
            raise ValueError(f"schedule.warmup={self.warmup}, decay={self.decay}: shares, together at most 1")
        if self.from_here is not None:
            _check_onward(self.from_here, "schedule.from_here")

    @property
    def depends_on_total(self) -> bool:
        """Whether the rate at a step changes when the run is made longer."""
        return self.name not in ("constant", "inverse-sqrt") or self.warmup > 0


def _check_onward(kind: str, name: str) -> None:
    if kind not in ONWARD:
        raise ValueError(f"{name}={kind!r}: use one of {', '.join(ONWARD)}")


def extend(schedule: Schedule, since: int, before: int) -> Schedule:
    """The schedule of a run that is made longer than the steps that it had `before`, when `since` of them are done."""
    stretches = tuple(stretch for stretch in schedule.stretches if stretch.since < since)
    if unused := schedule.stretches[len(stretches) :]:  # nothing was trained in them
        before = unused[0].before
    done = dataclasses.replace(schedule, stretches=stretches)
    rate = max(float(learning_rate(done, since - 1, before)), LEAST * schedule.peak)
    return dataclasses.replace(schedule, stretches=(*stretches, Stretch(schedule.from_here, since, before, rate)))


def learning_rate(schedule: Schedule, step: Array | int, steps: int) -> Array:
    """f32[] rate for the update number step + 1 of `steps`; step is 0-based."""
    totals = [*(stretch.before for stretch in schedule.stretches), steps]
    rate = _planned(schedule, step, totals[0])
    for stretch, total in zip(schedule.stretches, totals[1:], strict=True):
        rate = jnp.where(jnp.asarray(step) < stretch.since, rate, _onward(schedule, stretch, step, total))
    return rate


def _onward(schedule: Schedule, stretch: Stretch, step: Array | int, steps: int) -> Array:
    """f32[] rate in a stretch that ends at `steps`."""
    span = max(1.0, steps - stretch.since) if stretch.kind == "decay" else jnp.inf
    progress = jnp.clip((jnp.asarray(step, jnp.float32) + 1.0 - stretch.since) / span, 0.0, 1.0)
    return (stretch.rate + (schedule.final * schedule.peak - stretch.rate) * progress).astype(jnp.float32)


def _planned(schedule: Schedule, step: Array | int, steps: int) -> Array:
    """f32[] rate of a run that was never made longer."""
    update = jnp.asarray(step, jnp.float32) + 1.0
    warmup = max(1.0, round(schedule.warmup * steps))
    rise = jnp.minimum(update / warmup, 1.0)
    progress = jnp.clip((update - warmup) / max(1.0, steps - warmup), 0.0, 1.0)
    falls = {
        "linear": lambda: 1.0 - (1.0 - schedule.final) * progress,
        "cosine": lambda: schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
        "polynomial": lambda: schedule.final + (1.0 - schedule.final) * (1.0 - progress) ** schedule.power,
        "inverse-sqrt": lambda: jnp.sqrt(warmup / jnp.maximum(update, warmup)),
        "warmup-stable-decay": lambda: _stable_then_decay(schedule, update, steps),
        "constant": lambda: 1.0,
    }
    return (schedule.peak * rise * falls[schedule.name]()).astype(jnp.float32)


def _stable_then_decay(schedule: Schedule, update: Array, steps: int) -> Array:
    span = max(1.0, round(schedule.decay * steps))
    progress = jnp.clip((update - (steps - span)) / span, 0.0, 1.0)
    return 1.0 - (1.0 - schedule.final) * progress
