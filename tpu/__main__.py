"""python -m tpu plan | local | launch | status | logs | stop | delete"""

import dataclasses
import re
import signal
from collections.abc import Callable
from typing import Any

from data_pipelines.command_line import dispatch, end_with, parse
from data_pipelines.errors import UserError
from tpu import control
from tpu.generations import GENERATIONS
from tpu.launch import Launch, launch, run_arguments
from tpu.local import Local, local
from tpu.topologies import parse_accelerator

USAGE = """python -m tpu COMMAND ...

  plan RECIPE --topology v5e:4x4 [--mesh data=4,fsdp=4] [--batch-size N] [--sequence-length L] [fields of the recipe]
                            compile the train step for a TPU slice, without one: memory, collectives, estimated speed
  plan --all                plan every recipe on a slice of each TPU generation; write a table
  local [--processes N] [--devices M] -- COMMAND ...
                            run a command as a cluster of N processes on this machine
  launch RECIPE --name N --type v5litepod-16 --zone Z --bucket gs://B [--spot] [options of pretrain run]
                            create a TPU slice that trains the recipe, show the log, recreate the slice if preempted
  status --name N --bucket gs://B    show the state of the slice and of each host
  logs   --name N --bucket gs://B    print the log of the run
  stop   --name N --bucket gs://B    write a checkpoint and end the run
  delete --name N --bucket gs://B    delete the slice; files in the bucket stay

COMMAND --help lists the options of a command. Exit status: 0 success, 2 an error whose message says how to fix it;
launch returns the exit status of the run (75: stopped, with a checkpoint)."""


def main(arguments: list[str]) -> int:
    """Run a command and return its exit status."""
    try:
        return dispatch(arguments, USAGE, COMMANDS, lambda command, rest: COMMANDS[command](rest))
    except KeyboardInterrupt:
        return 130


def _plan(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for the compiler
    from pretrain.commands.arguments import parse_target

    if arguments[:1] in (["-h"], ["--help"]):
        parse_target(arguments)
    from pretrain.commands.planning import plan_command

    return plan_command(arguments)


def _local(arguments: list[str]) -> int:
    options, command = arguments, []
    if "--" in arguments:
        options, command = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    return local(parse(Local, options, "python -m tpu local"), command)


def _launch(arguments: list[str]) -> int:
    launch_arguments, further = split(Launch, arguments)
    options = parse(Launch, launch_arguments, "python -m tpu launch")
    run = run_arguments(options, further)
    from models.core.program import PLAIN
    from pretrain.commands.run import parse_run
    from pretrain.recipe import check
    from pretrain.training.attention_choice import chosen_program
    from pretrain.training.placement import check_batches
    from tpu.mesh import MeshShape, parse_mesh

    # Report mistakes before a VM costs anything. The automatic mesh cuts the batch over all devices.
    recipe, settings = parse_run(run)
    check(recipe)
    for name in ("coordinator", "processes", "process"):
        if getattr(settings, name) is not None:
            raise UserError(f"--{name} {getattr(settings, name)}: leave it out; hosts of a slice find each other")
    if settings.track:
        raise UserError(f"--track {' '.join(settings.track)}: leave it out; hosts of a slice have no tracker installed")
    parts = settings.init_from.split(",") if settings.init_from else []
    if not all(re.match(r"(\w+=)?gs://", part) for part in parts):
        raise UserError(f"--init-from {settings.init_from}: must be a gs:// path, because the VMs see no other")
    named, accelerator = settings.attention, parse_accelerator(options.type)
    chosen, generation = chosen_program(recipe, settings, platform="tpu").attention, accelerator.generation
    if named and chosen not in PLAIN and not GENERATIONS[generation].kernels:
        raise UserError(f"--attention {named}: no kernel compiles for TPU {generation}; use xla")
    devices = accelerator.devices * options.slices
    shape = parse_mesh(settings.mesh, devices, options.slices) if settings.mesh else MeshShape(data=devices)
    check_batches(recipe, settings.microbatches, shape)
    return launch(options, run)


def split(options: type, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those of a command's dataclass, with all before the first option, and all others."""
    names = {"-h", "--help", *(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options))}
    known, further = [], []
    target = known
    for argument in arguments:
        if argument.startswith("--") or argument == "-h":
            target = known if argument.partition("=")[0].replace("_", "-") in names else further
        target.append(argument)
    return known, further


def _of_launched(command: Callable[[Any], int], options: type = control.Run) -> Callable[[list[str]], int]:
    """Return a command for a launched run, called with its arguments."""
    return lambda arguments: command(parse(options, arguments, f"python -m tpu {command.__name__}"))


COMMANDS = {
    "plan": _plan,
    "local": _local,
    "launch": _launch,
    "status": _of_launched(control.status),
    "logs": _of_launched(control.logs, control.Logs),
    "stop": _of_launched(control.stop),
    "delete": _of_launched(control.delete),
}

if __name__ == "__main__":
    end_with(main)
