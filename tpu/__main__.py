"""python -m tpu local"""

import sys

from data_pipelines.command_line import parse
from data_pipelines.errors import UserError

USAGE = """python -m tpu COMMAND ...

  local [--processes N] [--devices M] -- COMMAND ...   run a command as a cluster of N processes on this machine

--help after a command lists its options. Exit status: 0 done, 2 an error that the message says how to cure."""


def main(arguments: list[str]) -> int:
    """Run a command -> exit status."""
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        if command not in COMMANDS:
            raise UserError(f"unknown command {command!r}: use one of {', '.join(COMMANDS)}")
        return COMMANDS[command](rest)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _local(arguments: list[str]) -> int:
    from tpu.local import Local, local

    own, command = arguments, []
    if "--" in arguments:
        own, command = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    return local(parse(Local, own, "python -m tpu local"), command)


COMMANDS = {"local": _local}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
