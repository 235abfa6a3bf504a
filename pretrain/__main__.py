"""python -m pretrain run | eval | plot | pattern | export | generate | prompts | discriminator | recipes | demo"""

import os
import signal
import sys

if __name__ == "__main__":  # before what takes long to import

    def end(number: int, frame) -> None:
        print(f"{signal.Signals(number).name}: ended before there was anything to save", file=sys.stderr, flush=True)
        os._exit(75)

    # Until `pretrain.training.signals` hears them. A KeyboardInterrupt in a callback, as JAX has one, would be printed
    # and forgotten; what is cut off anywhere leaves nothing half-written.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)

import logging
from importlib import import_module

from data_pipelines.command_line import dispatch, end_with
from pretrain.commands.platform import prepare

USAGE = """python -m pretrain COMMAND ...

  recipes [--json RECIPE]                   what can be trained; one recipe as a file to edit
  run RECIPE --corpus DIR --workdir DIR     train, or go on in the same directory; `--recipe FILE.json` in place of a
                                            name takes a saved or an edited recipe
  eval RUN [--all]                          figures on the held-out set, beside what guessing reaches
  plot RUN [RUN ...] --out FILE.png         learning curves
  pattern RECIPE --out FILE.png             what sees what in a sparse pattern, per layer and head
  export RUN --to DIR [--step N]            files that Hugging Face loads
  generate RUN --prompt TEXT                what a decoder or encoder-decoder writes, or what stands at [MASK]s
  prompts RUN --examples FILE.jsonl         what a causal decoder answers after 0, 1, ... examples
  discriminator RUN --examples FILE --out DIR   what tells labelled texts, to steer what a causal decoder writes
  demo                                      all of it on the built-in corpus, in minutes on a CPU

--help after a command lists its options. Exit status: 0 done, 2 an error that the message says how to cure,
75 stopped by a signal after writing a checkpoint, 134 another process or the storage is gone: after both the same
command goes on."""


# Each is the module of that name in pretrain/commands/: options, and main(arguments) -> exit status.
COMMANDS = "recipes", "run", "eval", "plot", "pattern", "export", "generate", "prompts", "discriminator", "demo"


def main(arguments: list[str]) -> int:
    """Run a command -> exit status."""
    prepare_program()
    run = lambda command, rest: import_module(f"pretrain.commands.{command}").main(rest)
    return dispatch(arguments, USAGE, COMMANDS, run)


def prepare_program() -> None:
    """Make this process ready for commands that use JAX."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    prepare()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("absl", "asyncio"):  # what Orbax and Grain log as errors, they also raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _leave_out_afterthoughts


def _leave_out_afterthoughts(unraisable) -> None:
    """TensorStore's threads say, with a stack each, that nobody waits any more for writes beside one that failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    end_with(main)
