"""`python -m finetune run TASK`: finetunes a model on a task's files, or goes on in the same work directory."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from data_pipelines.command_line import parse, unknown
from data_pipelines.errors import UserError
from finetune.options import Run, Training
from finetune.registry import TASKS
from finetune.task import FinetuningTask
from finetune.training import Files, finetune
from pretrain.commands.arguments import UNNAMED
from pretrain.commands.platform import keep_compiled_with
from pretrain.training.signals import stop_request
from tpu.cluster import ending_together, join
from tpu.compiled import keep_programs_whole


def main(arguments: Sequence[str]) -> int:
    task, options = parse_run(arguments)
    return train({"": Files(task, options.train, options.dev)}, options)


def train(tasks: dict[str, Files], options: Training) -> int:
    """`finetune` as a program of its own."""
    keep_compiled_with(options.workdir)
    keep_programs_whole()
    with stop_request() as stop:
        join(options.coordinator, options.processes, options.process)
        with ending_together():
            return finetune(tasks, options, stop)


def parse_run(arguments: Sequence[str]) -> tuple[FinetuningTask, Run]:
    """`classify --from RUN --train FILE --dev FILE --workdir DIR` -> the task with its fields, and how it is run."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        alone = dataclasses.make_dataclass("Arguments", [("options", Annotated[Run, UNNAMED])])
        alone.__doc__ = f"Finetune a model on a task: {', '.join(TASKS)}. Each has further options: TASK --help."
        parse(alone, [name], "python -m finetune run TASK")
    if name not in TASKS:
        what = "run: name a task first, as in `python -m finetune run classify`; there is no"
        raise UserError(unknown(what, name, TASKS))
    fields = [("options", Annotated[Run, UNNAMED]), ("task", Annotated[TASKS[name], UNNAMED])]
    both = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    both.__doc__ = f"Finetune a model: {TASKS[name].__doc__}"
    try:
        parsed = parse(both, rest, f"python -m finetune run {name}")
    except ValueError as error:  # a task's own check
        raise UserError(str(error)) from None
    return parsed.task, parsed.options
