"""A folder of tasks: NAME.json each, an object of which `task` is the task and all else options of `finetune run`, by
their names, with paths relative to the file:

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
GIVEN = "from", "from_scratch", "seed", "workdir"  # by the command, for all tasks


def task_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The objects by name, in order of names, with whole paths. UserError where there is none, or one that is none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UserError(f"--tasks {folder}: has no .json file; give a folder with one for each task")
    for file in files:
        if {*":/"} & {*file.stem}:
            raise UserError(f"{file}: its name is that of the task, and has no colon; rename it")
    return {file.stem: _read(file) for file in files}


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error}); give a JSON object") from None
    if not isinstance(fields, dict) or not {"task", *PATHS} <= fields.keys():
        raise UserError(f"{file}: is no task; give an object with task, {', '.join(PATHS)} and options of its run")
    if given := [name for name in fields if name.replace("-", "_") in GIVEN]:
        raise UserError(f"{file}: has {' and '.join(given)}, which the command says for all tasks; take it out")
    paths = {name: file.parent / str(fields[name]) for name in PATHS}
    for name, path in paths.items():  # before the tasks of other files are trained on
        if not path.is_file():
            raise UserError(f"{file}: {name} is {path}, which does not exist; give it relative to this file")
    return fields | {name: str(path) for name, path in paths.items()}


def of_task_file(fields: Mapping[str, Any], **options: Any) -> tuple[FinetuningTask, Run]:
    """The task of an object, and how it is run with further options: those of `finetune run`, by their names."""
    given = {name: value for name, value in fields.items() if name != "task"} | options
    arguments = [str(fields["task"])]
    for name, value in given.items():
        arguments += _argument(name, value)
    return parse_run(arguments)


def _argument(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [as_option(name, value)]
    return [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
