"""What is trained: one frozen value, its checks, and its JSON form."""

import dataclasses
import json
import typing
from typing import Any

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.families import FAMILIES
from models.ranges import COUNT, SHARE, Range, check_ranges
from pretrain.objectives.objective import Objective
from pretrain.objectives.registry import OBJECTIVES
from pretrain.optimizers import Optimizer
from pretrain.schedules import Schedule

SEED = Range("at least 0 and below 2**32", lambda x: 0 <= x < 2**32)
LENGTH = Range("at least 8 and below 2**31", lambda x: 8 <= x < 2**31)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training at one shape: BERT's is 90% of the steps at length 128, then 10% at 512.

    share: of the run's steps.   length: tokens per row.   batch_size: rows per step, over all devices.
    """

    share: float
    length: int
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """source: paper.   steps: of all phases together.   frozen: parameter path prefixes that are not trained."""

    name: str
    source: str
    model: Any
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    phases: tuple[Phase, ...]
    steps: int
    seed: int = 0
    frozen: tuple[str, ...] = ()


def boundaries(recipe: Recipe) -> list[int]:
    """The step at which each phase ends; the last is recipe.steps."""
    ends, share = [], 0.0
    for phase in recipe.phases:
        share += phase.share
        ends.append(round(share * recipe.steps))
    return [*ends[:-1], recipe.steps]


def phase_at(recipe: Recipe, step: int) -> int:
    """Index of the phase that step (0-based) belongs to; the last phase from its start on."""
    return next((i for i, end in enumerate(boundaries(recipe)) if step < end), len(recipe.phases) - 1)


def resolve(recipe: Recipe, corpus: Corpus) -> Recipe:
    """The recipe with the corpus's vocabulary size, checked: UserError on the first thing that cannot train."""
    try:
        model = dataclasses.replace(recipe.model, vocab_size=corpus.vocab_size)
    except ValueError as error:  # sizes that do not go with this vocabulary
        raise UserError(str(error)) from None
    resolved = dataclasses.replace(recipe, model=model)
    check(resolved)
    resolved.objective.check(resolved.model, corpus, resolved.phases)
    return resolved


def check(recipe: Recipe) -> None:
    """UserError on a setting out of range."""
    try:
        check_ranges(recipe, {"steps": COUNT, "seed": SEED}, "")
        for index, phase in enumerate(recipe.phases):
            check_ranges(phase, {"share": SHARE, "length": LENGTH, "batch_size": COUNT}, f"phases.{index}.")
    except ValueError as error:
        raise UserError(str(error)) from None
    if not recipe.phases or abs(sum(phase.share for phase in recipe.phases) - 1) > 1e-6:
        raise UserError(f"phases: the shares are {[p.share for p in recipe.phases]}, they must add up to 1")
    for index, phase in enumerate(recipe.phases):
        longest = getattr(recipe.model, "positions", phase.length)  # a bag of words has no limit
        if phase.length > longest:
            raise UserError(
                f"phases.{index}.length={phase.length} is longer than model.positions={longest}: "
                "lower the one or raise the other"
            )
        recipe.objective.check_phase(phase)


def to_json(recipe: Recipe) -> str:
    """Readable JSON; `from_json` gives the equal recipe back."""
    fields = dataclasses.asdict(recipe)
    fields["model"] = {"family": type(recipe.model).__name__, **fields["model"]}
    fields["objective"] = {"kind": type(recipe.objective).__name__, **fields["objective"]}
    return json.dumps(fields, indent=2) + "\n"


def from_json(text: str) -> Recipe:
    """The inverse of `to_json`; UserError for a recipe that this version does not know."""
    configs = {family.config.__name__: family.config for family in FAMILIES.values()}
    try:
        fields = json.loads(text)
        model = _build(configs[fields["model"].pop("family")], fields.pop("model"))
        objective = _build(OBJECTIVES[fields["objective"].pop("kind")], fields.pop("objective"))
        return _build(Recipe, fields | {"model": model, "objective": objective})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"not a recipe of this version ({error!r}): use the version that wrote it") from None


def _build(kind, value):
    """JSON -> the dataclass, tuple or scalar that the annotation `kind` names."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], field) for name, field in value.items()})
    if typing.get_origin(kind) is tuple:
        return tuple(_build(typing.get_args(kind)[0], item) for item in value)
    return value
