"""Teachers of a run: their sources and configs from `--teacher`, and the weights that a student takes from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_pipelines.cloud import is_file, local_folder, place
from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from models.core.parameters import LAYERS, Params, leaves, nest
from models.families.registry import name_of, renamed
from pretrain.huggingface.config import config_from
from pretrain.huggingface.load import counterparts
from pretrain.objectives.distillation import CausalDistillation, Distillation, Taught
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.matching import Match, teacher_layers
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Objective, Teacher
from pretrain.recipe import Recipe, model_in, with_objectives
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import own_parameters

TAUGHT = {MaskedLanguageModel: Distillation, NextTokenPrediction: CausalDistillation}
OUTSIDE = "embeddings"  # of `Teacher.copied`: what is outside of the layers


def with_sources(recipe: Recipe, given: str | None, workdir: RunDirectory) -> Recipe:
    """Give the recipe's teachers the sources of `--teacher` (PATH, or NAME=PATH,NAME=PATH) and the configs there; a
    recipe without teachers gets one, and the loss of logits by kl. When a run is resumed from a checkpoint, its
    teachers are those that it began with, and no source is read. UserError if a source is missing or wrong, or if a
    recipe cannot be taught."""
    if given is None and all(teacher.source for teacher in recipe.teachers):
        return recipe
    if not recipe.teachers:
        teacher = Teacher("teacher", "", recipe.model)
        in_step = lambda objective: dataclasses.replace(_taught(objective), stored=0, soft_targets="")
        recipe = dataclasses.replace(with_objectives(recipe, in_step), teachers=(teacher,))
    resumed = workdir.checkpoint_steps()
    former = workdir.read_recipe().teachers if resumed else ()
    sources = {teacher.name: teacher.source for teacher in former}
    if given is None and not former:
        raise UserError(f"--teacher: {recipe.name} needs one; give a Hugging Face folder or the workdir of a run")
    listed = sources if given is None else _listed(given, [teacher.name for teacher in recipe.teachers])
    if resumed and listed != sources:
        began = ", ".join(f"{name}={source}" for name, source in sources.items()) or "none"
        raise UserError(
            f"--teacher {given}: the run in {workdir.path} began with {began}; give that, or use another --workdir"
        )
    teachers = former or tuple(
        dataclasses.replace(teacher, source=listed[teacher.name], model=_config(listed[teacher.name]))
        for teacher in recipe.teachers
    )
    recipe = dataclasses.replace(recipe, teachers=teachers)
    for index, teacher in enumerate(recipe.teachers):
        if teacher.copied:
            _layers(_setting(index, teacher), teacher, recipe.model)
    return recipe


def _listed(given: str, names: Sequence[str]) -> dict[str, str]:
    """Return the source of each teacher."""
    parts = [part.partition("=") for part in given.split(",")]
    named = len(names) > 1 or parts[0][0] in names and parts[0][1]
    listed = {name: path for name, _, path in parts} if named else {names[0]: given}
    if sorted(listed) != sorted(names) or not all(listed.values()) or named and len(parts) > len(names):
        raise UserError(f"--teacher {given}: the recipe's teachers are {', '.join(names)}; write NAME=PATH,NAME=PATH")
    return listed


def of_stored(recipe: Recipe, k: int, digest: str = "") -> Recipe:
    """Return the recipe as it learns from k soft targets of a place, and from no teacher; UserError if it cannot."""

    def change(objective: Objective) -> Taught:
        taught = _taught(objective)
        if [match.name for match in taught.losses] != [Match().name]:
            raise UserError("objective.losses: soft targets have one, of logits by kl; change them")
        if getattr(taught, "auxiliary", 0):
            raise UserError(f"objective.auxiliary={taught.auxiliary}: soft targets have one set of tokens; set it to 0")
        if not taught.own:
            raise UserError("objective.own=0.0: held-out rows have no soft targets, but this loss; give 0.01")
        if not getattr(taught, "masking", Masking(copies=1)).copies:
            raise UserError("objective.masking.copies=0: soft targets are of fixed masks; give how many, like 10")
        return dataclasses.replace(taught, stored=k, soft_targets=digest)

    if any(teacher.copied for teacher in recipe.teachers):
        raise UserError("teachers.0.copied: soft targets have no weights to begin with; leave it out")
    return dataclasses.replace(with_objectives(recipe, change), teachers=())


def _taught(objective: Objective) -> Taught:
    kind, name = TAUGHT.get(type(objective), type(objective)), type(objective).__name__
    if not issubclass(kind, Taught):
        known = " or ".join(known.__name__ for known in TAUGHT)
        raise UserError(f"objective {name}: learns from no teacher and no soft targets; use a recipe with {known}")
    return kind(**vars(objective))


def _setting(index: int, teacher: Teacher) -> str:
    return f"teachers.{index}.copied={teacher.copied!r}"


def _config(source: str) -> Any:
    directory = RunDirectory(place(source))
    if is_file(directory.recipe):
        return model_in(recipe := directory.read_recipe(), len(recipe.phases) - 1)
    with local_folder(directory.path) as folder:
        try:
            return config_from(folder)
        except UserError as error:
            raise UserError(f"--teacher {error}") from None


def taken(recipe: Recipe, teachers: Mapping[str, Params], drawn: Params) -> Params:
    """Return a student's initial weights: the random ones, with what it takes from its teachers (`Teacher.copied`)."""
    flat, table = dict(leaves(drawn)), {row.path: row for row in own_parameters(recipe)}
    for index, teacher in enumerate(recipe.teachers):
        if teacher.copied:
            theirs = dict(leaves(teachers[teacher.name]))
            flat |= _taken(_setting(index, teacher), teacher, recipe.model, theirs, flat, table)
    return nest(flat)


def _layers(setting: str, teacher: Teacher, student: Any) -> np.ndarray | None:
    """Return the rows of the teacher's stack that a student takes, None for none; UserError if it cannot."""
    if renamed(teacher.model, student) is None:
        kinds = name_of(student), name_of(teacher.model)
        raise UserError(f"{setting}: a {kinds[0]} takes no weights from a {kinds[1]}; leave it out")
    if teacher.copied == OUTSIDE:
        return None
    try:
        return np.array(teacher_layers(teacher.copied, student.depth, teacher.model.depth)) - 1
    except ValueError as error:
        raise UserError(f"{setting}: {error}") from None


def _taken(setting: str, teacher: Teacher, student: Any, theirs: Mapping, ours: Mapping, table: Mapping) -> dict:
    rows, found = _layers(setting, teacher, student), {}
    for path, name in counterparts(teacher.model, student).items():
        in_layers = path in table and table[path].axes[:1] == (LAYERS,)
        if path not in ours or name not in theirs or in_layers and rows is None:
            continue
        if in_layers and {len(theirs[name]) - teacher.model.depth, len(ours[path]) - student.depth} != {0}:
            raise UserError(f"{setting}: layers are shared, or in several stacks; use {OUTSIDE}")
        array = theirs[name][rows] if in_layers else theirs[name]
        if array.shape == ours[path].shape:
            found[path] = array
        elif rows is not None or path.startswith(f"{OUTSIDE}/"):
            raise UserError(f"{setting}: {path} is {[*array.shape]} there and {[*ours[path].shape]} here; leave it out")
    return found
