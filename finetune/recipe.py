"""A run of finetuning as a recipe: the model that it begins with, the task, its buckets as tasks that take turns."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipelines.cloud import is_file, local_folder
from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import Made
from finetune.rows import buckets
from finetune.task import FinetuningTask
from models.families.registry import family_of, name_of
from pretrain.huggingface.config import config_from, folders
from pretrain.objectives.objective import Task
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.schedules import Schedule
from pretrain.storage.run_directory import RunDirectory


def source_model(source: Path) -> tuple[Any, Made]:
    """The config and the tokenizer of a run or of a Hugging Face folder. UserError where it is neither."""
    directory = RunDirectory(source)
    if is_file(directory.recipe):
        with local_folder(directory.tokenizer) as folder:
            return directory.read_recipe().model, stored.load(folder)
    if not is_file(directory.path / "config.json"):
        raise UserError(f"--from {source}: is no run, and no Hugging Face folder; give one of them")
    with local_folder(directory.path) as folder:
        config = config_from(folder)
        return config, stored.load(next(iter(folders(folder, family_of(config)).values())))


def with_labels(source: Path, config: Any, labels: Sequence[str]) -> Any:
    """The config of a model that tells these labels apart."""
    if not hasattr(config, "labels"):
        raise UserError(f"--from {source}: {name_of(config)} has no heads for tasks yet; take another model")
    return dataclasses.replace(config, labels=tuple(labels))


def recipe_of(
    name: str,
    model: Any,
    task: FinetuningTask,
    lengths: Sequence[np.ndarray],
    length: int,
    batch_size: int,
    epochs: float,
    optimizer: Optimizer,
    schedule: Schedule,
    seed: int,
) -> Recipe:
    """lengths: i64[rows], in tokens, of the rows to train on and of those to evaluate.   length: the longest."""
    ends, train = buckets(np.concatenate(lengths)), lengths[0]
    tasks = []
    for above, end in zip([0, *ends], ends, strict=False):
        number = int(((train > above) & (train <= end)).sum())
        if number:
            of_bucket = dataclasses.replace(task, bucket=(above, end))
            tasks.append(Task(f":{end}", of_bucket, float(number)))
    return Recipe(
        name=name,
        source="finetuning",
        model=model,
        objective=tasks[0].objective,
        optimizer=optimizer,
        schedule=schedule,
        phases=(task.phase(1.0, min(length, ends[-1]), batch_size, tasks=tuple(tasks), **task.sizes),),
        steps=math.ceil(len(train) * epochs / batch_size),
        seed=seed,
    )
