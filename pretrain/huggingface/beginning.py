"""How a model begins with the weights of another: of its own family or of one that it continues, whose rows for
positions are copied on where it has more of them."""

import logging
from collections.abc import Mapping

import numpy as np

from models.attention.patterns.pattern import Pattern, fields_of
from models.families.registry import family_of, renamed

POSITION = "position"  # the axis of what has a row for each position

log = logging.getLogger(__name__)


def counterparts(theirs, ours) -> dict[str, str]:
    """Path of a parameter of a model of config `ours` -> of that which it begins as in one of `theirs`; of those that
    have one."""
    there = {parameter.path for parameter in family_of(theirs).parameters(theirs)}
    names = renamed(theirs, ours)
    begun = {p.path: names.get(p.path, p.path) for p in family_of(ours).parameters(ours)}
    return {path: name for path, name in begun.items() if name in there}


def as_theirs(params: Mapping[str, np.ndarray], theirs, ours) -> dict[str, np.ndarray]:
    """Parameters of a model of config `ours`, path -> array, under their names and with the shapes in `theirs`."""
    resized = _resized(params, ours, getattr(theirs, "positions", None))
    return {name: resized[path] for path, name in counterparts(theirs, ours).items()}


def as_ours(source: str, params: Mapping[str, np.ndarray], theirs, ours) -> dict[str, np.ndarray]:
    """The inverse: what parameters of a model of config `theirs` are in one of `ours`, path -> array."""
    named = {path: params[name] for path, name in counterparts(theirs, ours).items()}
    before, after = (getattr(config, "positions", None) for config in (theirs, ours))
    if before and after and before != after:
        log.warning("%s: its %s positions are copied on to %s", source, f"{before:,}", f"{after:,}")
    if changed := other_pattern(theirs, ours):
        log.warning("%s: its weights go on with another sparse pattern: %s", source, changed)
    return _resized(named, ours, after)


def other_pattern(theirs, ours) -> str:
    """The fields of a sparse pattern in which two configs differ, '' where they see the same keys."""
    before, after = (getattr(config, "pattern", Pattern()) for config in (theirs, ours))
    if before.name != after.name:
        return f"model.pattern.name is {before.name} there and {after.name} here"
    values = {name: (getattr(before, name), getattr(after, name)) for name in fields_of(after.name)}
    differing = {name: both for name, both in values.items() if both[0] != both[1]}
    return ", ".join(f"model.pattern.{name} is {old} there and {new} here" for name, (old, new) in differing.items())


def _resized(params: Mapping[str, np.ndarray], config, positions: int | None) -> dict[str, np.ndarray]:
    """The same with so many positions: without the last ones, or with the first ones again after them."""
    axes = {parameter.path: parameter.axes for parameter in family_of(config).parameters(config)}
    return {path: _repeated(array, axes[path], positions) for path, array in params.items()}


def _repeated(array: np.ndarray, axes: tuple[str | None, ...], positions: int | None) -> np.ndarray:
    if POSITION not in axes or positions is None:
        return array
    axis = axes.index(POSITION)
    return np.take(array, np.arange(positions) % array.shape[axis], axis)
