"""`python -m finetune run TASK`: finetunes a model on a task, or resumes the run in --workdir."""

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
    """Run `finetune` as the main program of this process and return the exit status."""
    keep_compiled_with(options.workdir)
    keep_programs_whole()
    with stop_request() as stop:
        join(options.coordinator, options.processes, options.process)
        with ending_together():
            return finetune(tasks, options, stop)


def parse_run(arguments: Sequence[str]) -> tuple[FinetuningTask, Run]:
    """Parse `classify --from RUN --train FILE --dev FILE --workdir DIR` into a task and the options of its run."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        alone = dataclasses.make_dataclass("Arguments", [("options", Annotated[Run, UNNAMED])])
        alone.__doc__ = f"Finetune a model on a task: {', '.join(TASKS)}. For the options of a task: TASK --help."
        parse(alone, [name], "python -m finetune run TASK")
    if name not in TASKS:
        what = "run: name a task first, as in `python -m finetune run classify`; unknown task"
        raise UserError(unknown(what, name, TASKS))
    fields = [("options", Annotated[Run, UNNAMED]), ("task", Annotated[TASKS[name], UNNAMED])]
    both = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    both.__doc__ = f"Finetune a model: {TASKS[name].__doc__}"
    try:
        parsed = parse(both, rest, f"python -m finetune run {name}")
    except ValueError as error:  # from the task's checks
        raise UserError(str(error).replace("losses.layers=", "--layers ")) from None
    return parsed.task, parsed.options
