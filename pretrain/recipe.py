"""The recipe of a training as one frozen value, its checks, and its JSON form."""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Suppress

from data_pipelines.command_line import unknown
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Layout
from data_pipelines.mixture import parse_rates
from data_pipelines.order import Order
from data_pipelines.tokenizers import stored as tokenizers
from models.attention.patterns import pattern
from models.blocks.heads import CLASSIFIER, TAGGER
from models.core.family import unfit_inputs
from models.core.program import Program
from models.core.ranges import COUNT, POSITIVE, SEED, SHARE, Range, check_ranges
from models.families.registry import FAMILIES, family_of
from pretrain.huggingface.config import check_fit
from pretrain.json_values import KIND, make, once, plain
from pretrain.lora import Lora, with_products
from pretrain.objectives.causal_language_model import CausalLanguageModel
from pretrain.objectives.distillation import CausalDistillation, Distillation
from pretrain.objectives.masked_language_model import MaskedLanguageModel, MaskedUnits, MaskedWithGlobals
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Objective, Phase, Task, Teacher
from pretrain.objectives.permutation_language_model import PermutationLanguageModel
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from pretrain.objectives.sequence_to_sequence import SequenceToSequence
from pretrain.objectives.span_boundary import SpanBoundaryObjective
from pretrain.objectives.unified_language_model import UnifiedLanguageModel
from pretrain.optimizers import Optimizer
from pretrain.schedules import Numbers, Schedule, learning_rate, numbers

OBJECTIVES = {
    "causal-language-model": CausalLanguageModel,
    "causal-distillation": CausalDistillation,
    "distillation": Distillation,
    "masked-language-model": MaskedLanguageModel,
    "masked-units": MaskedUnits,
    "masked-with-globals": MaskedWithGlobals,
    "next-token-prediction": NextTokenPrediction,
    "permutation-language-model": PermutationLanguageModel,
    "replaced-token-detection": ReplacedTokenDetection,
    "sequence-to-sequence": SequenceToSequence,
    "span-boundary": SpanBoundaryObjective,
    "unified-language-model": UnifiedLanguageModel,
}  # by their names in recipe.json
LEAST = 0.1  # lowest learning rate with which an extended run continues, as a share of the peak
LENGTH = Range("at least 8 and below 2**31", lambda x: 8 <= x < 2**31)

FAMILY = "family"  # key in JSON that names the family of a config
TAGGED = "model", "objective"  # fields that may have one of several classes


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines what is trained."""

    name: str  # name in the log
    source: str  # paper that it follows
    model: Any
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    phases: tuple[Phase, ...]
    steps: int  # number of steps of all phases together
    seed: int = 0  # random seed of weights, batches and noise
    order: Order = Order()  # order in which the parts of the corpus are read
    mixture: str = "proportional"  # shares of several corpora: proportional[:LIMIT], smoothed:S, ...
    frozen: tuple[str, ...] = ()  # path prefixes of parameters that are not trained
    teachers: tuple[Teacher, ...] = ()  # frozen models that the objective needs
    lora: Annotated[Lora | None, Suppress] = None  # low-rank updates that are trained in place of frozen matrices


def boundaries(recipe: Recipe) -> list[int]:
    """Return the step at which each phase ends; the last is recipe.steps."""
    ends, share = [], 0.0
    for phase in recipe.phases:
        share += phase.share
        ends.append(round(share * recipe.steps))
    return [*ends[:-1], recipe.steps]


def phase_at(recipe: Recipe, step: int) -> int:
    """Return the index of the phase that a step (0-based) belongs to; the last phase for steps beyond the end."""
    return next((i for i, end in enumerate(boundaries(recipe)) if step < end), len(recipe.phases) - 1)


def phase_after(recipe: Recipe, step: int) -> int:
    """Return the phase that the train state belongs to after `step` steps: that of the last batch."""
    return phase_at(recipe, max(step - 1, 0))


def schedule_in(recipe: Recipe, phase: int) -> tuple[str, Numbers]:
    """Return (name, numbers) of a phase's schedule: its own, or the recipe's over the adjacent phases that share it."""
    phases, begins = recipe.phases, [0, *boundaries(recipe)]
    if (schedule := phases[phase].schedule) is not None:
        return schedule.name, numbers(schedule, begins[phase + 1] - begins[phase], begins[phase])
    first, end = _shared_span(phases, phase)
    return recipe.schedule.name, numbers(recipe.schedule, begins[end] - begins[first], begins[first])


def _shared_span(phases: Sequence[Phase], index: int) -> tuple[int, int]:
    """Return the range (first, end) of adjacent phases that share the recipe's schedule with this one."""
    others = [number for number, phase in enumerate(phases) if phase.schedule is not None]
    first = max((number + 1 for number in others if number < index), default=0)
    return first, min((number for number in others if number > index), default=len(phases))


def rate_after(recipe: Recipe, step: int) -> float:
    """Return the learning rate of the update that follows `step` steps."""
    return float(learning_rate(*schedule_in(recipe, phase_at(recipe, step)), step))


def extended(recipe: Recipe, done: int, steps: int, kind: str) -> Recipe:
    """Extend a recipe to `steps` steps: a new phase like the last one follows the steps that are `done`.

    kind: 'constant' keeps the current learning rate; 'decay' lowers it linearly to `final` x peak. The rate starts at
    `LEAST` x peak or more: at 0 a run would learn nothing. UserError if the last phase has not begun.
    """
    last, begins = recipe.phases[-1], [0, *boundaries(recipe)]
    if phase_after(recipe, done) + 1 < len(recipe.phases):
        raise UserError(f"--extend {kind}: after {done} steps the last phase has not begun; train until it has")
    schedule = last.schedule or recipe.schedule
    rate, lowest = max(rate_after(recipe, done - 1), LEAST * schedule.peak), schedule.final * schedule.peak
    name = {"constant": "constant", "decay": "linear"}[kind]
    continuation = Schedule(name, peak=rate, warmup=0.0, final=min(lowest / rate, 1.0) if rate else 0.0)
    sizes = [min(end, done) - begin for begin, end in itertools.pairwise(begins)]
    phases = [dataclasses.replace(p, share=size / steps) for p, size in zip(recipe.phases, sizes, strict=True)]
    if last.schedule is None:  # the steps done keep their learning rates
        first, _ = _shared_span(recipe.phases, len(recipe.phases) - 1)
        shared = dataclasses.replace(recipe.schedule, steps=recipe.schedule.steps or recipe.steps - begins[first])
    else:
        shared = recipe.schedule
        planned = dataclasses.replace(last.schedule, steps=last.schedule.steps or recipe.steps - begins[-2])
        phases[-1] = dataclasses.replace(phases[-1], schedule=planned)
    further = dataclasses.replace(last, share=(steps - done) / steps, schedule=continuation)
    return dataclasses.replace(recipe, steps=steps, phases=(*phases, further), schedule=shared)


def same_programs(recipe: Recipe) -> Recipe:
    """Reset the fields that compiled programs do not depend on: equal results mean the same programs."""
    return dataclasses.replace(recipe, name="", source="", seed=0)


def tasks_of(recipe: Recipe, phase: Phase) -> tuple[Task, ...]:
    """Return the tasks of a phase; a single task without a name if it has one objective."""
    return phase.tasks or (Task("", phase.objective or recipe.objective),)


def model_in(recipe: Recipe, index: int) -> Any:
    """Return the config of the model in a phase. ValueError if it has no such field or the number is out of range."""
    phase, model = recipe.phases[index], recipe.model
    if phase.global_base is None:
        return model
    if not hasattr(model, "global_base"):
        raise ValueError(f"phases.{index}.global_base={phase.global_base}: this model has none; leave it out")
    try:
        return dataclasses.replace(model, global_base=phase.global_base)
    except ValueError as error:
        raise ValueError(str(error).replace("model.", f"phases.{index}.", 1)) from error


def group_of(task: str) -> str:
    """Return the name of a task up to a colon: tasks of one group share their metrics."""
    return task.partition(":")[0]


def every_task(recipe: Recipe) -> list[tuple[int, Phase, Task]]:
    """List (index of the phase, phase, task) for all tasks of all phases."""
    return [(i, phase, task) for i, phase in enumerate(recipe.phases) for task in tasks_of(recipe, phase)]


def asked(recipe: Recipe) -> tuple[type | str, ...]:
    """Return the heads and protocols that the objectives together need of the model."""
    return tuple(dict.fromkeys(need for _, _, task in every_task(recipe) for need in task.objective.asks))


def asked_of_teachers(recipe: Recipe) -> dict[str, tuple[type | str, ...]]:
    """Return the heads and protocols that the objectives together need of each teacher, by its name."""
    asks: dict[str, dict[type | str, None]] = {}
    for _, _, task in every_task(recipe):
        for name, wanted in task.objective.teachers.items():
            asks.setdefault(name, {}).update(dict.fromkeys(wanted))
    return {name: tuple(wanted) for name, wanted in asks.items()}


def projections(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Return path -> shape of the matrices beside the model's that objectives need; see `Objective.projections`."""
    teachers, found = {teacher.name: teacher.model for teacher in recipe.teachers}, {}
    for _, _, task in every_task(recipe):
        found |= task.objective.projections(recipe.model, teachers)
    return found


def with_objectives(recipe: Recipe, change: Callable[[Objective], Objective]) -> Recipe:
    """Apply a change to each objective of a recipe."""

    def changed(phase: Phase) -> Phase:
        tasks = tuple(dataclasses.replace(task, objective=change(task.objective)) for task in phase.tasks)
        return dataclasses.replace(phase, objective=phase.objective and change(phase.objective), tasks=tasks)

    return dataclasses.replace(
        recipe, objective=change(recipe.objective), phases=tuple(changed(phase) for phase in recipe.phases)
    )


def resolve(recipe: Recipe, corpus: Corpus) -> Recipe:
    """Set the vocabulary size to the corpus's and check the recipe; UserError for the first problem."""
    try:
        of_corpus = partial(dataclasses.replace, vocab_size=corpus.vocab_size)
        teachers = tuple(dataclasses.replace(teacher, model=of_corpus(teacher.model)) for teacher in recipe.teachers)
        resolved = dataclasses.replace(recipe, model=of_corpus(recipe.model), teachers=teachers)
    except ValueError as error:  # sizes that do not fit this vocabulary
        raise UserError(str(error)) from None
    check(resolved)
    tokenizer = tokenizers.load(corpus.tokenizer_path)
    check_fit(f"--corpus {corpus.source}", resolved.model, tokenizer)
    return resolved


def check(recipe: Recipe) -> None:
    """Raise UserError for a setting that is out of range, or for settings that do not fit together."""
    try:
        check_ranges(recipe, {"steps": COUNT, "seed": SEED}, "")
        for index, phase in enumerate(recipe.phases):
            check_ranges(phase, {"share": SHARE, "length": LENGTH, "batch_size": COUNT}, f"phases.{index}.")
            for number, task in enumerate(phase.tasks):
                check_ranges(task, {"rate": POSITIVE}, f"phases.{index}.tasks.{number}.")
            _check_tasks(phase, f"phases.{index}.")
            recipe.order.check(f"phases.{index}.batch_size", phase.batch_size)
            model_in(recipe, index)
        with_products(family_of(recipe.model).every_parameter(recipe.model), recipe.lora)
    except ValueError as error:
        raise UserError(str(error)) from None
    if not recipe.phases or abs(sum(phase.share for phase in recipe.phases) - 1) > 1e-6:
        raise UserError(f"phases: the shares {[p.share for p in recipe.phases]} must add up to 1; change them")
    _check_teachers(recipe)
    if (labels := getattr(recipe.model, "labels", ())) and not {CLASSIFIER, TAGGER} & {*asked(recipe)}:
        raise UserError(f"model.labels={list(labels)}: no objective here predicts labels; leave it out")
    for index, phase, task in every_task(recipe):
        with naming(task):
            _check_task(recipe, index, phase, task.objective)
    projections(recipe)


@contextlib.contextmanager
def naming(task: Task) -> Iterator[None]:
    """Add the task's name, if it has one, to a UserError raised in this context."""
    try:
        yield
    except UserError as error:
        if not task.name:
            raise
        raise type(error)(f"task {task.name}: {error}") from None


def _check_task(recipe: Recipe, index: int, phase: Phase, objective: Objective) -> None:
    rows = rows_of(objective, phase, f"phases.{index}.")
    if phase.batch_size * rows.tokens >= 2**31:
        sizes = f"phases.{index}.batch_size={phase.batch_size} of length={phase.length}"
        raise UserError(f"{sizes}: a step must have fewer than 2**31 tokens; lower one of them")
    rows.check_rows(phase.batch_size // recipe.order.lanes)
    models = {"model": (recipe.model, objective.asks)}
    for number, teacher in enumerate(recipe.teachers):
        if teacher.name in objective.teachers:
            models[f"teachers.{number}.model"] = teacher.model, objective.teachers[teacher.name]
    for setting, (config, asks) in models.items():
        longest = getattr(config, "positions", math.inf)  # no limit for a bag of words
        for field in ("length", "target_length"):
            if (length := getattr(phase, field, 0)) > longest:
                raise UserError(
                    f"phases.{index}.{field}={length}: exceeds {setting}.positions={longest}; lower it or raise that"
                )
        check_pattern(config, phase.length, f"phases.{index}.length={phase.length}", setting)
        whose = "" if setting == "model" else "the teacher's "
        _check_model(whose, config, objective, asks, phase)


def _check_tasks(phase: Phase, prefix: str) -> None:
    names = [task.name for task in phase.tasks]
    if len({*names, "", "loss"}) < len(names) + 2 or "/" in "".join(names):
        raise ValueError(f"{prefix}tasks: the names {names} must differ, without / and other than loss; rename them")
    if phase.rates and (not phase.tasks or any(task.rate != 1.0 for task in phase.tasks)):
        reason = "replaces the rate of each task; leave out those" if phase.tasks else "needs tasks; give them"
        raise ValueError(f"{prefix}rates={phase.rates}: {reason}")
    if phase.rates:
        parse_rates(phase.rates, dict.fromkeys(names, 1), f"{prefix}rates")
    if phase.tasks and phase.objective is not None:
        raise ValueError(f"{prefix}objective: has no effect with tasks; leave one of them out")
    for task in phase.tasks:
        if not isinstance(phase, task.objective.phase):
            raise ValueError(f"{prefix}tasks: {task.name} needs a {task.objective.phase.__name__}; list it first")


def rows_of(objective: Objective, phase: Phase, prefix: str) -> Layout:
    """Return the layout of an objective's rows in a phase; UserError if they do not fit.   prefix: of fields."""
    try:
        return objective.rows(phase)
    except UserError as error:
        of_phase = str(error).partition("=")[0] in {field.name for field in dataclasses.fields(phase)}
        raise UserError(f"{prefix if of_phase else ''}{error}") from None


def _check_teachers(recipe: Recipe) -> None:
    names, wanted = [teacher.name for teacher in recipe.teachers], sorted(asked_of_teachers(recipe))
    if sorted(names) != wanted:
        objectives = " and ".join(dict.fromkeys(type(task.objective).__name__ for _, _, task in every_task(recipe)))
        raise UserError(
            f"teachers: the recipe has {', '.join(names) or 'none'}, {objectives} needs "
            f"{', '.join(wanted) or 'none'}; give each a name, a source and a model in --recipe FILE.json"
        )


def check_pattern(config: Any, length: int, given: str, setting: str = "model") -> None:
    """Raise UserError if a sparse pattern does not fit rows of this length.   given, setting: of length and model."""
    path = f"{setting}.pattern" if "pattern" in {field.name for field in dataclasses.fields(config)} else setting
    for name, (depth, heads) in pattern.encoders(config).items():
        if config.pattern.name != pattern.DENSE and (block := config.pattern.block) > length:
            raise UserError(f"{given}: {path}.block={block} is longer than a row; lower it, or use longer rows")
        try:
            pattern.check(config.pattern, depth, heads, length)
        except ValueError as error:
            encoder = f" ({setting}.{name})" if name else ""
            raise UserError(f"{given}{encoder}: {str(error).replace('model.', f'{setting}.', 1)}") from None


def _check_model(whose: str, config: Any, objective: Objective, asks: tuple[type | str, ...], phase: Phase) -> None:
    """Raise UserError if a model lacks what the objective needs, or if the rows lack inputs of the model."""
    family, config_name = family_of(config), f"{whose}{type(config).__name__}"
    model, name = family.module(config, Program()), type(objective).__name__
    heads = [head.name for head in family.heads]
    has = lambda asked: asked in heads if isinstance(asked, str) else isinstance(model, asked)
    lacking = [asked if isinstance(asked, str) else asked.__name__ for asked in asks if not has(asked)]
    if lacking:
        cure = "give another --teacher" if whose else "change one of them"
        raise UserError(f"objective {name}: needs {', '.join(lacking)}, which {config_name} lacks; {cure}")
    if unfit := unfit_inputs(family.inputs, objective.spec(phase)):
        raise UserError(f"objective {name}: its rows do not fit {config_name}: {'; '.join(unfit)}; change one of them")


def to_json(recipe: Recipe) -> str:
    """Write a recipe as readable JSON; `from_json` is the inverse."""
    fields = plain(Recipe, recipe)
    phases = list(zip(recipe.phases, fields["phases"], strict=True))
    tasks = [pair for phase, written in phases for pair in zip(phase.tasks, written.get("tasks", ()), strict=True)]
    teachers = zip(recipe.teachers, fields.get("teachers", ()), strict=True)
    for part, written in [(recipe, fields), *phases, *tasks, *teachers]:
        written |= {name: _tagged(name, value) for name in TAGGED if (value := getattr(part, name, None)) is not None}
    return json.dumps(fields, indent=2) + "\n"


def from_json(text: str) -> Recipe:
    """Parse what `to_json` wrote; UserError naming a field that is unknown, missing or of the wrong type."""
    try:
        fields = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({error}); restore it from a copy, or write it again") from None
    if not isinstance(fields, dict):
        raise UserError("is not a recipe, which is a JSON object; write it again")
    objective = _of_class(fields, "objective", "")
    made = {}
    for name, build_one in {"phases": partial(_phase, objective), "teachers": partial(_part, Teacher)}.items():
        if isinstance(listed := fields.get(name), list):
            made[name] = tuple(build_one(item, f"{name}.{index}.") for index, item in enumerate(listed))
    return _part(Recipe, fields, "", objective=objective, **made)


def read_recipe(file: Path) -> Recipe:
    """Read a recipe from a JSON file, local or gs://; UserError if that fails."""
    try:
        return from_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file}: cannot be read ({reason}); give the path of a recipe.json") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _classes(name: str) -> tuple[str, Mapping[str, type]]:
    """Return (key in JSON that names the class of a field of TAGGED, the classes by name)."""
    configs = {name: family.config for name, family in FAMILIES.items()}
    return {"model": (FAMILY, configs), "objective": (KIND, OBJECTIVES)}[name]


def _tagged(name: str, value: Any) -> dict:
    """Return the JSON fields of a value of TAGGED, including the name of its class."""
    tag, classes = _classes(name)
    return {tag: next(known for known, cls in classes.items() if cls is type(value)), **plain(type(value), value)}


def _without(fields: dict, made: Mapping[str, Any]) -> dict:
    return {name: value for name, value in fields.items() if name not in made}


def _phase(objective: Objective, fields: Any, prefix: str) -> Phase:
    """Make a phase from its JSON fields.   objective: the recipe's."""
    _check_object(Phase, fields, prefix)
    made: dict[str, Any] = {"objective": None}
    if fields.get("objective") is not None:
        made["objective"] = objective = _of_class(fields, "objective", prefix)
    if isinstance(tasks := fields.get("tasks"), list):
        if not tasks:
            raise UserError(f"{prefix}tasks: is empty; add tasks, or leave it out")
        made["tasks"] = tuple(_part(Task, item, f"{prefix}tasks.{number}.") for number, item in enumerate(tasks))
        objective = made["tasks"][0].objective
    theirs, known = (
        {field.name for kind in kinds for field in dataclasses.fields(kind.phase)}
        for kinds in (OBJECTIVES.values(), (objective,))
    )
    if foreign := [name for name in fields if name in theirs - known]:
        kind, also = _tagged("objective", objective)[KIND], ", or put a task that has it first" if tasks else ""
        raise UserError(f"{prefix}{foreign[0]}: a phase of {kind} has no such field; leave it out{also}")
    return make(objective.phase, _without(fields, made), prefix, **made)


def _part(cls: type, fields: Any, prefix: str, **made) -> Any:
    """Make a dataclass of a recipe from its JSON fields.   made: fields already made.   prefix: of their names."""
    _check_object(cls, fields, prefix)
    tagged = [field.name for field in dataclasses.fields(cls) if field.name in TAGGED and field.name not in made]
    made |= {name: _of_class(fields, name, prefix) for name in tagged}
    return make(cls, _without(fields, made), prefix, **made)


def _check_object(cls: type, fields: Any, prefix: str) -> None:
    if not isinstance(fields, dict):
        needed = ", ".join(field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING)
        raise UserError(f"{prefix.removesuffix('.')}={fields!r}: must be an object with {needed}")


def _of_class(fields: dict, name: str, prefix: str) -> Any:
    """Make a field of TAGGED, whose class is named as in its registry."""
    (tag, classes), value, name = _classes(name), fields.get(name), prefix + name
    if not isinstance(value, dict):
        raise UserError(f"{name}={value!r}: must be an object with {tag} and fields")
    if str(value.get(tag)) not in classes:
        raise UserError(unknown(f"{name}.{tag}: this version has no", str(value.get(tag)), classes))
    return make(classes[value[tag]], _without(value, {tag: None}), f"{name}.")
