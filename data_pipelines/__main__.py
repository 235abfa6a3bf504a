"""python -m data_pipelines prepare --source KIND:LOCATION --out CORPUS [...]    tokenise text and store it as a corpus
python -m data_pipelines show CORPUS [--recipe NAME|FILE]                     print statistics and examples
python -m data_pipelines verify CORPUS                                        check the hash of every file
python -m data_pipelines segment --words SEGMENTER [--gold FILE] [...]        divide text into words, and score them

COMMAND --help lists the options of a command. Exit status: 0 success, 2 an error whose message says how to cure it,
130 interrupted, 134 a failed disk, storage or other process: start the same command again to continue.
"""

import signal
import sys

# Worker processes import this file, so each command imports its heavy modules itself.


def main(arguments: list[str]) -> int:
    """Run a command. Returns its exit status."""
    from rich.console import Console

    from data_pipelines.command_line import dispatch

    run = lambda command, rest: COMMANDS[command](rest, Console(highlight=False))
    try:
        return dispatch(arguments, __doc__.strip(), COMMANDS, run)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # already ending
        goes_on = "; start the same command again to continue" if arguments[0] == "prepare" else ""
        print(f"interrupted{goes_on}", file=sys.stderr)
        return 130


def prepare(arguments: list[str], console) -> None:
    from data_pipelines.command_line import parse
    from data_pipelines.prepare.command import prepare
    from data_pipelines.prepare.options import Prepare

    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse(Prepare, arguments[:at], "python -m data_pipelines prepare")
    prepare(options, console, arguments[at + 1 :])


def show(arguments: list[str], console) -> None:
    from tokenizers import Tokenizer

    from data_pipelines.command_line import parse
    from data_pipelines.corpus import open_corpora, sound
    from data_pipelines.errors import UserError
    from data_pipelines.show import Show, show_examples, show_statistics

    options = parse(Show, arguments, "python -m data_pipelines show")
    if options.examples < 1:
        raise UserError(f"--examples {options.examples}: give 1 or more")
    corpora = open_corpora(options.corpus, {})
    with sound(corpora.values()):
        batch = None if options.recipe is None else _examples(corpora, options)  # an error of the recipe comes first
        for corpus in corpora.values():
            tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path / "tokenizer.json"))
            show_statistics(corpus, tokenizer, console)
    if batch is not None:
        show_examples(tokenizer, corpus.special.get("mask", -1), batch, console)


def _examples(corpora, options) -> dict:
    """Return the first rows of the recipe's first task: name -> array [examples, ...]."""
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"  # recipes import JAX; nothing runs on a device

    import numpy as np

    from data_pipelines.cloud import place
    from pretrain.recipe import every_task, read_recipe, resolve
    from pretrain.recipes.registry import find
    from pretrain.training.data import check_data, training_batches

    is_file = options.recipe.endswith(".json")
    recipe = read_recipe(place(options.recipe)) if is_file else find(options.recipe)
    recipe = resolve(recipe, next(iter(corpora.values())))
    check_data(recipe, corpora)
    _, phase, task = every_task(recipe)[0]
    return training_batches(recipe, corpora, phase, task).batch(0, np.arange(options.examples))


def verify(arguments: list[str], console) -> None:
    from data_pipelines.command_line import parse
    from data_pipelines.show import Verify, verify

    verify(parse(Verify, arguments, "python -m data_pipelines verify"), console)


def segment(arguments: list[str], console) -> None:
    from data_pipelines.command_line import parse
    from data_pipelines.segment import Segment, segment

    segment(parse(Segment, arguments, "python -m data_pipelines segment"), console)


COMMANDS = {"prepare": prepare, "show": show, "verify": verify, "segment": segment}

if __name__ == "__main__":
    try:
        from data_pipelines.command_line import end_with

        end_with(main)
    except KeyboardInterrupt:  # during the imports
        print("interrupted", file=sys.stderr)
        sys.exit(130)
