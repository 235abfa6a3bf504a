"""python -m finetune run | several | suite | eval | export | probe | attention | neighbours"""

from importlib import import_module

from data_pipelines.command_line import dispatch, end_with
from pretrain.__main__ import prepare_program

USAGE = """python -m finetune COMMAND ...

  run TASK --from MODEL --train FILE --dev FILE --workdir DIR   finetune a model, or go on in the same directory; tasks:
                                                                answer, choose, classify, tag, write
  several --from MODEL --tasks DIR --workdir DIR                the same on several tasks at once
  suite MODEL --tasks DIR --out FILE.md                         its scores on each task of a folder, over several seeds
  eval RUN --test FILE [--predictions FILE]                     what it answers, and how good that is
  export RUN --to DIR                                           the model with its head, for Hugging Face
  probe RUN --train FILE --dev FILE --out DIR                   what linear probes read off each layer, as a picture
  attention RUN --text TEXT --out FILE                          what each head looks at, as a picture
  attention RUN --trees FILE --out FILE                         which head finds which relations of trees, as a table
  neighbours RUN --word WORD --texts FILE                       words of a file that are most like one in its context

--help after a command lists its options. Exit status: as of `python -m pretrain`."""

# Each the module of that name in finetune/commands/
COMMANDS = "run", "several", "suite", "eval", "export", "probe", "attention", "neighbours"


def main(arguments: list[str]) -> int:
    """Run a command -> exit status."""
    prepare_program()
    return dispatch(
        arguments, USAGE, COMMANDS, lambda name, rest: import_module(f"finetune.commands.{name}").main(rest)
    )


if __name__ == "__main__":
    end_with(main)
