"""python -m finetune run | augment | several | suite | eval | export | probe | attention | neighbours"""

from importlib import import_module

from data_pipelines.command_line import dispatch, end_with
from pretrain.__main__ import prepare_program

USAGE = """python -m finetune COMMAND ...

  run TASK --from MODEL --train FILE --dev FILE --workdir DIR   finetune a model, or resume the run in --workdir; tasks:
                                                                answer, choose, classify, tag, write
  augment FILE --model MODEL --out FILE                         copy the rows of a training file with other words
  several --from MODEL --tasks DIR --workdir DIR                finetune one model on several tasks at once
  suite MODEL --tasks DIR --out FILE.md                         finetune and score a model on a folder of tasks
  eval RUN --test FILE [--predictions FILE]                     compute metrics on a file and write predictions
  export RUN --to DIR                                           write the model with its head for Hugging Face
  probe RUN --train FILE --dev FILE --out DIR                   train linear probes on each layer and plot their scores
  attention RUN --text TEXT --out FILE                          draw the attention of each head over a text
  attention RUN --trees FILE --out FILE                         find the heads that follow each syntactic relation
  neighbours RUN --word WORD --texts FILE                       find the words most similar to a word in its context

--help after a command lists its options. Exit status: as for `python -m pretrain`."""

# Each is a module in finetune/commands/
COMMANDS = "run", "augment", "several", "suite", "eval", "export", "probe", "attention", "neighbours"


def main(arguments: list[str]) -> int:
    """Run a command and return its exit status."""
    prepare_program()
    run = lambda name, rest: import_module(f"finetune.commands.{name}").main(rest)
    return dispatch(arguments, USAGE, COMMANDS, run)


if __name__ == "__main__":
    end_with(main)
