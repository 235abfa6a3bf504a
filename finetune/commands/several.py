"""`python -m finetune several`: finetunes one model on several tasks at once (Liu et al. 2019, arXiv:1901.11504)."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from data_pipelines.command_line import parse
from data_pipelines.errors import UserError
from finetune.commands.run import train
from finetune.options import Training
from finetune.task_files import of_task_file, task_files
from finetune.tasks.classify import Classify
from finetune.training import Files

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several(Training):
    """Finetune one model on several tasks at once: each step trains one task, drawn in proportion to its size, and each
    task has its own outputs in the head. To continue with a single task, use `finetune run --from` this run."""

    tasks: Path
    """Folder with one JSON file for each task; options of a run in these files have no effect."""


def main(arguments: Sequence[str]) -> int:
    options = parse(Several, arguments, "python -m finetune several")
    tasks, of_run = {}, {field.name for field in dataclasses.fields(Training)}
    for name, fields in task_files(options.tasks).items():
        task, run = of_task_file(fields, **{"from": options.source, "workdir": options.workdir})
        if not isinstance(task, Classify):
            raise UserError(f"{options.tasks / name}.json: {fields['task']} must run alone; move it out of the folder")
        tasks[name] = Files(task, run.train, run.dev)
        if unread := sorted(of_run & fields.keys()):
            log.warning("%s.json: run options (%s) have no effect here", options.tasks / name, ", ".join(unread))
    return train(tasks, options)
