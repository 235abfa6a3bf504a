"""python -m pretrain COMMAND: see `USAGE`."""

import inspect
import os
import signal
import sys

if __name__ == "__main__":  # before the imports, which take long

    def end(number: int, frame) -> None:
        print(f"{signal.Signals(number).name}: stopped before there was anything to save", file=sys.stderr, flush=True)
        os._exit(75)

    # Until `pretrain.training.signals` handles them. Python prints and drops a KeyboardInterrupt in a callback, such as
    # JAX's. Exiting at once is safe: files are never left half-written.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)

import logging
from importlib import import_module

from data_pipelines.command_line import dispatch, end_with
from pretrain.commands.platform import prepare

USAGE = """python -m pretrain COMMAND ...

  recipes [--json RECIPE]                   list the recipes, or print one as a file to edit
  run RECIPE --corpus DIR --workdir DIR     train, or resume in the same directory; `--recipe FILE.json` in place of a
                                            name takes a saved or an edited recipe
  annotate RECIPE --corpus DIR --teacher DIR  store what a teacher predicts, for students: run --soft-targets
  eval RUN [--all]                          evaluate on the held-out set and compare with simple baselines
  plot RUN [RUN ...] --out FILE.png         draw learning curves
  pattern RECIPE --out FILE.png             draw a sparse attention pattern, per layer and head
  export RUN --to DIR [--step N]            write files that Hugging Face loads
  generate RUN --prompt TEXT                continue a prompt, or fill its [MASK]s
  prompts RUN --examples FILE.jsonl         evaluate a causal decoder on questions, zero-shot and few-shot
  discriminator RUN --examples FILE --out DIR   train a classifier of texts that steers `generate`
  demo                                      all of it on the built-in corpus, in minutes on a CPU

--help after a command lists its options. Exit status: 0 done; 2 an error, whose message says how to fix it; 75 stopped
by a signal after writing a checkpoint; 134 another process or the storage is gone. After 75 and 134 the same command
resumes."""


# Each is a module in pretrain/commands/ with the command's options and main(arguments) -> exit status.
COMMANDS = "recipes", "run", "annotate", "eval", "plot", "pattern", "export", "generate"
COMMANDS += "prompts", "discriminator", "demo"


def main(arguments: list[str]) -> int:
    """Run a command -> exit status."""
    prepare_program()
    run = lambda command, rest: import_module(f"pretrain.commands.{command}").main(rest)
    return dispatch(arguments, USAGE, COMMANDS, run)


def prepare_program() -> None:
    """Prepare this process for commands that use JAX."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    prepare()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("absl", "asyncio"):  # Orbax and Grain also raise what they log as errors
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _hide_late_errors


def _hide_late_errors(unraisable) -> None:
    """Hide the stack traces of what Orbax was reading or writing beside the file that has failed, and has raised."""
    if not inspect.iscoroutine(unraisable.object) and str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    end_with(main)
