"""Reads a folder of tasks: one NAME.json for each, an object with `task` and options of `finetune run` by name, and
with paths relative to the file:

    {"task": "classify", "train": "rte/train.tsv", "dev": "rte/dev.tsv", "text": ["first", "second"], "epochs": 5}
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipelines.command_line import as_option
from data_pipelines.errors import UserError
from finetune.commands.run import parse_run
from finetune.options import Run
from finetune.task import FinetuningTask

PATHS = "train", "dev"
GIVEN = "from", "from_scratch", "seed", "workdir"  # set by the command for all tasks


def task_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the objects by task name, sorted, with full paths. UserError if a file is malformed or there is none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UserError(f"--tasks {folder}: has no .json file; give a folder with one for each task")
    for file in files:
        if {*":/"} & {*file.stem}:
            raise UserError(f"{file}: a task's name must not contain a colon; rename the file")
    return {file.stem: _read(file) for file in files}


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error}); give a JSON object") from None
    if not isinstance(fields, dict) or not {"task", *PATHS} <= fields.keys():
        raise UserError(f"{file}: is not a task; give an object with task, {', '.join(PATHS)} and options of its run")
    if given := [name for name in fields if name.replace("-", "_") in GIVEN]:
        raise UserError(f"{file}: sets {' and '.join(given)}, which the command sets for all tasks; remove it")
    paths = {name: file.parent / str(fields[name]) for name in PATHS}
    for name, path in paths.items():  # fail before training on the tasks of other files
        if not path.is_file():
            raise UserError(f"{file}: {name} is {path}, which does not exist; give it relative to this file")
    return fields | {name: str(path) for name, path in paths.items()}


def of_task_file(fields: Mapping[str, Any], **options: Any) -> tuple[FinetuningTask, Run]:
    """Return the task of an object and its run's options.   options: further options of `finetune run`, by name."""
    given = {name: value for name, value in fields.items() if name != "task"} | options
    arguments = [str(fields["task"])]
    for name, value in given.items():
        arguments += _argument(name, value)
    return parse_run(arguments)


def _argument(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [as_option(name, value)]
    return [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
