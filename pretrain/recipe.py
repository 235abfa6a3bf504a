"""What is trained: one frozen value, its checks, and its JSON form."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipelines.command_line import unknown
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Layout, StreamLayout
from data_pipelines.order import Order
from data_pipelines.tokenizers import stored as tokenizers
from models.attention.patterns import pattern
from models.core.family import unfit_inputs
from models.core.program import Program
from models.core.ranges import COUNT, SEED, SHARE, Range, check_ranges
from models.families.registry import FAMILIES, family_of
from pretrain.huggingface.tokenizer_fit import check_ids, check_types
from pretrain.json_values import KIND, build, make, plain
from pretrain.objectives.objective import Objective
from pretrain.objectives.phase import Phase
from pretrain.objectives.registry import OBJECTIVES
from pretrain.objectives.teacher import Teacher
from pretrain.optimizers import Optimizer
from pretrain.schedules import Schedule

LENGTH = Range("at least 8 and below 2**31", lambda x: 8 <= x < 2**31)

FAMILY = "family"  # names the config's family in JSON
OF_OLDER_FILES = ("pair_head",)  # fields in them of models; the objective says which heads a model has


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained."""

    name: str  # what the log calls it
    source: str  # paper
    model: Any
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    phases: tuple[Phase, ...]
    steps: int  # of all phases together
    seed: int = 0  # of weights, batches and noise
    order: Order = Order()  # in which the corpus's parts come
    mixture: str = "proportional"  # how often each of several corpora comes: proportional[:LIMIT], smoothed:S, ...
    frozen: tuple[str, ...] = ()  # parameter path prefixes that are not trained
    teachers: tuple[Teacher, ...] = ()  # frozen models that the objective asks for


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

        def of_corpus(config):
            return dataclasses.replace(config, vocab_size=corpus.vocab_size)

        teachers = tuple(dataclasses.replace(one, model=of_corpus(one.model)) for one in recipe.teachers)
    except ValueError as error:  # sizes that do not go with this vocabulary
        raise UserError(str(error)) from None
    resolved = dataclasses.replace(recipe, model=model, teachers=teachers)
    check(resolved)
    made = tokenizers.load(corpus.tokenizer_path)
    check_types(f"--corpus {corpus.source}", model, made)
    check_ids(f"--corpus {corpus.source}", model, made)
    for phase in resolved.phases:
        resolved.objective.rows(phase).check(corpus)
    resolved.objective.check(resolved.model, corpus, resolved.phases)
    return resolved


def check(recipe: Recipe) -> None:
    """UserError on a setting out of range."""
    try:
        check_ranges(recipe, {"steps": COUNT, "seed": SEED}, "")
        for index, phase in enumerate(recipe.phases):
            check_ranges(phase, {"share": SHARE, "length": LENGTH, "batch_size": COUNT}, f"phases.{index}.")
            if phase.batch_size * phase.length >= 2**31:
                sizes = f"phases.{index}.batch_size={phase.batch_size} of length={phase.length}"
                raise ValueError(f"{sizes}: a step has less than 2**31 tokens; lower one of them")
    except ValueError as error:
        raise UserError(str(error)) from None
    if not recipe.phases or abs(sum(phase.share for phase in recipe.phases) - 1) > 1e-6:
        raise UserError(f"phases: the shares are {[p.share for p in recipe.phases]}, they must add up to 1")
    _check_teachers(recipe)
    models = {"model": (recipe.model, recipe.objective.asks)}
    for index, teacher in enumerate(recipe.teachers):
        models[f"teachers.{index}.model"] = teacher.model, recipe.objective.teachers[teacher.name]
    for index, phase in enumerate(recipe.phases):
        recipe.objective.check_phase(phase)
        recipe.order.check(f"phases.{index}.batch_size", phase.batch_size)
        rows = rows_of(recipe.objective, phase, f"phases.{index}.")
        if isinstance(rows, StreamLayout):
            rows.check_rows(phase.batch_size // recipe.order.lanes)
        for setting, (config, asks) in models.items():
            longest = getattr(config, "positions", phase.length)  # a bag of words has no limit
            if phase.length > longest:
                raise UserError(
                    f"phases.{index}.length={phase.length} is longer than {setting}.positions={longest}: "
                    "lower the one or raise the other"
                )
            check_pattern(config, phase.length, f"phases.{index}.length={phase.length}", setting)
            _check_model(config, recipe.objective, asks, phase)


def rows_of(objective: Objective, phase: Phase, prefix: str) -> Layout:
    """The objective's rows of a phase; UserError for a phase that they do not fit.   prefix: of its fields' names."""
    try:
        return objective.rows(phase)
    except UserError as error:
        of_phase = str(error).partition("=")[0] in {field.name for field in dataclasses.fields(phase)}
        raise UserError(f"{prefix if of_phase else ''}{error}") from None


def _check_teachers(recipe: Recipe) -> None:
    names, asked = [teacher.name for teacher in recipe.teachers], sorted(recipe.objective.teachers)
    if sorted(names) != asked:
        raise UserError(
            f"teachers: the recipe has {', '.join(names) or 'none'}, {type(recipe.objective).__name__} asks for "
            f"{', '.join(asked) or 'none'}; give each a name, a source and a model in --recipe FILE.json"
        )


def check_pattern(config: Any, length: int, given: str, setting: str = "model") -> None:
    """UserError where a model's sparse pattern cannot serve rows of this length.

    given: what names the length, setting: the model; a message begins with the one and says the other.
    """
    own = f"{setting}.pattern" if "pattern" in {field.name for field in dataclasses.fields(config)} else setting
    for name, (depth, heads) in pattern.encoders(config).items():
        if config.pattern.name != pattern.DENSE and (block := config.pattern.block) > length:
            raise UserError(f"{given}: {own}.block={block} is longer than a row; lower it, or take longer rows")
        try:
            pattern.check(config.pattern, depth, heads, length)
        except ValueError as error:
            of = f" ({setting}.{name})" if name else ""
            raise UserError(f"{given}{of}: {str(error).replace('model.', f'{setting}.', 1)}") from None


def _check_model(config: Any, objective: Objective, asks: tuple[type | str, ...], phase: Phase) -> None:
    """UserError where a model lacks what the objective asks of it, or its rows what the model is given."""
    family, theirs = family_of(config), type(config).__name__
    model, ours = family.module(config, Program()), type(objective).__name__
    heads = [head.name for head in family.heads]
    has = lambda asked: asked in heads if isinstance(asked, str) else isinstance(model, asked)
    lacking = [asked if isinstance(asked, str) else asked.__name__ for asked in asks if not has(asked)]
    if lacking:
        raise UserError(f"objective {ours}: asks for {', '.join(lacking)}, which {theirs} has not; change one of them")
    if unfit := unfit_inputs(family.inputs, objective.spec(phase)):
        raise UserError(f"objective {ours}: its rows do not suit {theirs}: {'; '.join(unfit)}; change one of them")


def check_rowwise(recipe: Recipe, microbatches: int) -> None:
    """UserError where microbatches would change what is learned."""
    if microbatches > 1 and not recipe.objective.rowwise:
        raise UserError(
            f"--microbatches {microbatches}: {type(recipe.objective).__name__} compares the rows of a batch with one "
            "another, of which a microbatch has few; leave it out, and take more devices or a smaller batch"
        )


def to_json(recipe: Recipe) -> str:
    """Readable JSON; `from_json` gives the equal recipe back."""
    fields = plain(Recipe, recipe)
    fields["model"] = {FAMILY: _name(_configs(), recipe.model), **fields["model"]}
    fields["objective"] = {KIND: _name(OBJECTIVES, recipe.objective), **fields["objective"]}
    for teacher, of in zip(recipe.teachers, fields["teachers"], strict=True):
        of["model"] = {FAMILY: _name(_configs(), teacher.model), **of["model"]}
    if not recipe.teachers:
        del fields["teachers"]
    return json.dumps(fields, indent=2) + "\n"


def from_json(text: str) -> Recipe:
    """The inverse of `to_json`; UserError naming the field that is unknown, missing or of another type."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UserError(f"is not JSON ({error}); write it anew") from None
    if not isinstance(fields, dict):
        raise UserError("is no recipe, which is a JSON object; write it anew")
    model = _of_class(fields, "model", FAMILY, _configs())
    objective = _of_class(fields, "objective", KIND, OBJECTIVES)
    made = {"model": model, "objective": objective}
    if isinstance(phases := fields.get("phases"), list):
        made["phases"] = build(tuple[objective.phase, ...], phases, "phases")
    if isinstance(teachers := fields.get("teachers"), list):
        made["teachers"] = tuple(_teacher(of, f"teachers.{index}") for index, of in enumerate(teachers))
    return make(Recipe, {name: value for name, value in fields.items() if name not in made}, "", **made)


def read_recipe(file: Path) -> Recipe:
    """The recipe in a JSON file, local or gs://; UserError where there is none."""
    try:
        return from_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file}: cannot be read ({reason}); give the path of a recipe.json") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _configs() -> dict[str, type]:
    return {name: family.config for name, family in FAMILIES.items()}


def _name(classes: Mapping[str, type], value) -> str:
    return next(name for name, cls in classes.items() if cls is type(value))


def _teacher(fields: Any, path: str) -> Teacher:
    if not isinstance(fields, dict):
        raise UserError(f"{path}={fields!r}: must be an object with name, source and model")
    model = _of_class(fields, "model", FAMILY, _configs(), f"{path}.")
    return make(Teacher, {name: of for name, of in fields.items() if name != "model"}, f"{path}.", model=model)


def _of_class(fields: dict, name: str, tag: str, classes: Mapping[str, type], before: str = "") -> Any:
    """The field of a recipe whose class stands in its `tag`, by its name in a registry; in older files by its own.

    before: what stands before the field's name in a message.
    """
    value, name = fields.get(name), before + name
    if not isinstance(value, dict):
        raise UserError(f"{name}={value!r}: must be an object with {tag} and fields")
    known = {cls.__name__: cls for cls in classes.values()} | dict(classes)
    if str(value.get(tag)) not in known:
        raise UserError(unknown(f"{name}.{tag}: this version has no", str(value.get(tag)), classes))
    gone = OF_OLDER_FILES if tag == FAMILY else ()
    inside = {field: item for field, item in value.items() if field not in (tag, *gone)}
    return make(known[value[tag]], inside, f"{name}.")
