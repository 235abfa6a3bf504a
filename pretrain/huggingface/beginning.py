"""How a model begins with the weights of another: of its own family or of one that it continues, whose rows for
positions are copied on where it has more of them, and the rows for more tokens are the mean of its."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from data_pipelines.errors import UserError
from models.attention.patterns.pattern import Pattern, fields_of
from models.blocks.embeddings import padded_vocab
from models.families.registry import family_of, renamed

ANEW = "start them anew with --init-heads-anew"
POSITION, TOKEN = "position", "vocab"  # the axes of what has a row for each position or token

log = logging.getLogger(__name__)


def counterparts(source, target) -> dict[str, str]:
    """Path of a parameter of a model of config `target` -> of that which it begins as in one of `source`; of those that
    have one."""
    there = {parameter.path for parameter in family_of(source).every_parameter(source)}
    names = renamed(source, target)
    begun = {p.path: names.get(p.path, p.path) for p in family_of(target).every_parameter(target)}
    return {path: name for path, name in begun.items() if name in there}


def to_source(params: Mapping[str, np.ndarray], source, target) -> dict[str, np.ndarray]:
    """Parameters of a model of config `target`, path -> array, under their names and with the shapes in `source`."""
    resized = _resized(params, target, target, source)
    return {name: resized[path] for path, name in counterparts(source, target).items() if path in params}


def to_target(setting: str, params: Mapping[str, np.ndarray], source, target) -> dict[str, np.ndarray]:
    """The inverse: what parameters of a model of config `source` are in one of `target`, path -> array."""
    named = {path: params[name] for path, name in counterparts(source, target).items() if name in params}
    before, after = (getattr(config, "positions", None) for config in (source, target))
    if before and after and before != after:
        log.warning("%s: its %s positions are copied on to %s", setting, f"{before:,}", f"{after:,}")
    if more := target.vocab_size - source.vocab_size:
        log.warning("%s: %s tokens that it lacks begin as the mean of the others", setting, f"{more:,}")
    if changed := other_pattern(source, target):
        log.warning("%s: its weights go on with another sparse pattern: %s", setting, changed)
    return _resized(named, target, source, target)


def check_heads(setting: str | Path, lacking: Collection[str], others: Collection[str], anew: bool) -> None:
    """Say what a source lacks, which starts anew, and what it has beside. UserError for what may not start anew."""
    if lacking and not anew:
        raise UserError(f"{setting}: has no {listed(lacking)}; give the recipe the heads that it has, or {ANEW}")
    if lacking:
        log.warning("%s: these start anew: %s", setting, listed(lacking))
    if others:
        log.warning("%s: left out %s, which this model does not use", setting, listed(others))


def listed(names: Collection[str]) -> str:
    """The first of them."""
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def other_pattern(source, target) -> str:
    """The fields of a sparse pattern in which two configs differ, '' where they see the same keys."""
    before, after = (getattr(config, "pattern", Pattern()) for config in (source, target))
    names = fields_of(after.name) if before.name == after.name else ("name",)
    both = {name: (getattr(before, name), getattr(after, name)) for name in names}
    return ", ".join(f"model.pattern.{name} is {x} there and {y} here" for name, (x, y) in both.items() if x != y)


def _resized(params: Mapping[str, np.ndarray], target, before, after) -> dict[str, np.ndarray]:
    """Parameters by their paths in a model of config `target`, with the positions and tokens of config `before`, with
    those of `after`: without the last ones, or with the first positions again, and tokens that are the others' mean."""
    axes = {parameter.path: parameter.axes for parameter in family_of(target).every_parameter(target)}
    positions, resized = getattr(after, "positions", None), {}
    for path, array in params.items():
        if POSITION in axes[path] and positions is not None:
            axis = axes[path].index(POSITION)
            array = np.take(array, np.arange(positions) % array.shape[axis], axis)
        if TOKEN in axes[path] and before.vocab_size != after.vocab_size:
            array = _of_tokens(array, axes[path].index(TOKEN), before.vocab_size, after.vocab_size)
        resized[path] = array
    return resized


def _of_tokens(array: np.ndarray, axis: int, before: int, after: int) -> np.ndarray:
    rows = np.moveaxis(array, axis, 0)
    resized = np.zeros((padded_vocab(after), *rows.shape[1:]), array.dtype)
    kept = min(before, after)
    resized[:kept] = rows[:kept]
    resized[before:after] = rows[:before].mean(0)
    return np.moveaxis(resized, 0, axis)
