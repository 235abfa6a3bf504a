"""python -m finetune run | eval | export"""

from importlib import import_module

from data_pipelines.command_line import dispatch, end_with
from pretrain.__main__ import prepare_program

USAGE = """python -m finetune COMMAND ...

  run TASK --from MODEL --train FILE --dev FILE --workdir DIR   finetune a model, or go on in the same directory; tasks:
                                                                answer, choose, classify, write
  eval RUN --test FILE [--predictions FILE]                     what it answers, and how good that is
  export RUN --to DIR                                           the model with its head, for Hugging Face

--help after a command lists its options. Exit status: as of `python -m pretrain`."""

COMMANDS = "run", "eval", "export"  # each the module of that name in finetune/commands/


def main(arguments: list[str]) -> int:
    """Run a command -> exit status."""
    prepare_program()
    return dispatch(
        arguments, USAGE, COMMANDS, lambda name, rest: import_module(f"finetune.commands.{name}").main(rest)
    )


if __name__ == "__main__":
    end_with(main)
