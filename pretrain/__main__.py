"""python -m pretrain run | eval | plot | pattern | export | generate | prompts | discriminator | recipes | demo"""

import sys

from pretrain.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # before what takes long to import

import dataclasses
import logging
import os
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from data_pipelines.cloud import is_remote
from data_pipelines.command_line import Place, end_with, parse
from data_pipelines.corpora import named
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.progress import IMPORTING, doing
from pretrain.commands.platform import keep_compiled_with, may_be_one_of_several, prepare

USAGE = """python -m pretrain COMMAND ...

  recipes [--json RECIPE]                   what can be trained; one recipe as a file to edit
  run RECIPE --corpus DIR --workdir DIR     train, or go on in the same directory; `--recipe FILE.json` in place of a
                                            name takes a saved or an edited recipe
  eval RUN [--all]                          figures on the held-out set, beside what guessing reaches
  plot RUN [RUN ...] --out FILE.png         learning curves
  pattern RECIPE --out FILE.png             what sees what in a sparse pattern, per layer and head
  export RUN --to DIR [--step N]            files that Hugging Face loads
  generate RUN --prompt TEXT                what a causal decoder writes next, or what stands at [MASK]s
  prompts RUN --examples FILE.jsonl         what a causal decoder answers after 0, 1, ... examples
  discriminator RUN --examples FILE --out DIR   what tells labelled texts, to steer what a causal decoder writes
  demo                                      all of it on the built-in corpus, in minutes on a CPU

--help after a command lists its options. Exit status: 0 done, 2 an error that the message says how to cure,
75 stopped by a signal after writing a checkpoint, 134 another process or the storage is gone: after both the same
command goes on."""


def main(arguments: list[str]) -> int:
    """Run a command -> exit status."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    prepare()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for theirs in ("absl", "asyncio"):  # what Orbax and Grain log as errors, they also raise
        logging.getLogger(theirs).setLevel(logging.CRITICAL)
    sys.unraisablehook = _leave_out_afterthoughts
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
        return error.status


def _leave_out_afterthoughts(unraisable) -> None:
    """TensorStore's threads say, with a stack each, that nobody waits any more for writes beside one that failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _recipes(arguments: list[str]) -> int:
    options = parse(Recipes, arguments, "python -m pretrain recipes")
    if options.json is not None:
        from pretrain.recipe import to_json
        from pretrain.recipes.registry import find

        print(to_json(find(options.json)), end="")
        return 0
    from pretrain.recipes.table import print_recipes

    print_recipes()
    return 0


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes: model, parameters, objective, source."""

    json: str | None = None
    """Print this recipe as a file for `run --recipe`, to be edited."""


def _run(arguments: list[str]) -> int:
    from pretrain.commands.arguments import parse_run

    recipe, options = parse_run(arguments)
    if options.coordinator is None and not may_be_one_of_several():
        for path in named(options.corpus).values():
            if not is_remote(path):
                Corpus(path)  # a mistaken one is said before the imports that follow, which take seconds
    from pretrain.training.signals import stop_request
    from tpu.cluster import ending_together, join
    from tpu.compiled import write_whole

    with stop_request() as stop:
        join(options.coordinator, options.processes, options.process)
        with ending_together():
            keep_compiled_with(options.workdir)
            write_whole()
            from pretrain.training.run import run

            return run(recipe, options, stop)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluate a run on its fixed held-out set."""

    run: Positional[Place]
    """Work directory of the run."""
    all: bool = False
    """Every checkpoint, not only the newest."""
    corpus: str | None = None
    """Where the run's corpus is now, or several by name, if it has moved."""
    examples: int | None = None
    """Rows of the held-out set: by default 1024, with --stride all."""
    memory: int | None = None
    """Positions that a language model remembers here, if not as many as in its recipe."""
    stride: int | None = None
    """Of all documents whole, in rows that begin so many tokens after each other and predict what no row before has."""


def _eval(arguments: list[str]) -> int:
    options = parse(Eval, arguments, "python -m pretrain eval")
    examples = options.examples
    if examples is None:
        examples = 1024 if options.stride is None else sys.maxsize
    if examples < 1:
        raise UserError(f"--examples {options.examples}: must be at least 1")
    doing(IMPORTING)
    from pretrain.commands.tables import print_evaluation
    from tpu.compiled import write_whole

    write_whole()
    print_evaluation(options.run, options.all, options.corpus, examples, options.memory, options.stride)
    return 0


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw learning curves of one or several runs."""

    runs: Positional[tuple[Place, ...]]
    """Work directories."""
    out: Path
    """The PNG (or PDF, SVG) file to write."""


def _plot(arguments: list[str]) -> int:
    options = parse(Plot, arguments, "python -m pretrain plot")
    if not options.runs:
        raise UserError("plot: name the --workdir of a run or several, as in `python -m pretrain plot RUN --out x.png`")
    doing(IMPORTING)
    from pretrain.commands.plot import plot

    print(plot(options.runs, options.out))
    return 0


def _pattern(arguments: list[str]) -> int:
    from pretrain.commands.arguments import parse_shown

    recipe, shown = parse_shown(arguments)
    from pretrain.commands.pattern import show_pattern

    show_pattern(recipe, shown)
    return 0


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a run's model as Hugging Face folders."""

    run: Positional[Place]
    """Work directory of the run."""
    to: Place
    """Folder to write."""
    step: int | None = None
    """Which checkpoint; by default the newest."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights."""


def _export(arguments: list[str]) -> int:
    options = parse(Export, arguments, "python -m pretrain export")
    doing(IMPORTING)
    from pretrain.commands.export import export_run
    from tpu.compiled import write_whole

    write_whole()
    for folder in export_run(options.run, options.to, options.step, options.dtype):
        print(folder)
    return 0


def _generate(arguments: list[str]) -> int:
    from pretrain.commands.options import parse_generate

    options, prompts = parse_generate(arguments)
    doing(IMPORTING)
    from pretrain.commands.generate import write_texts
    from tpu.compiled import write_whole

    write_whole()
    write_texts(options, prompts)
    return 0


def _prompts(arguments: list[str]) -> int:
    from pretrain.commands.options import parse_prompts

    options = parse_prompts(arguments)
    doing(IMPORTING)
    from pretrain.commands.prompts import ask
    from tpu.compiled import write_whole

    write_whole()
    ask(options)
    return 0


def _discriminator(arguments: list[str]) -> int:
    from pretrain.commands.options import parse_discriminate

    options = parse_discriminate(arguments)
    doing(IMPORTING)
    from pretrain.commands.discriminator import train
    from tpu.compiled import write_whole

    write_whole()
    train(options)
    return 0


@dataclasses.dataclass(frozen=True)
class Demo:
    """Prepare the built-in corpus, train an ELECTRA on it, evaluate, plot and export it."""

    folder: Path = Path("runs/demo")
    """Where everything goes; a second start goes on there."""
    steps: int | None = None
    """Train for fewer or more steps than the few minutes that the demo is meant to take."""


def _demo(arguments: list[str]) -> int:
    options = parse(Demo, arguments, "python -m pretrain demo")
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps {options.steps}: must be at least 1")
    doing(IMPORTING)
    from pretrain.commands.demo import demo
    from tpu.compiled import write_whole

    write_whole()
    return demo(options.folder, options.steps)


COMMANDS = {"recipes": _recipes, "run": _run, "eval": _eval, "plot": _plot, "pattern": _pattern, "export": _export}
COMMANDS |= {"generate": _generate, "prompts": _prompts, "discriminator": _discriminator, "demo": _demo}


if __name__ == "__main__":
    end_with(main)
