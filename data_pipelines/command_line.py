"""Parse the options of a command into a frozen dataclass with `tyro`, and report errors as one line."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Annotated, NoReturn, TypeVar

import tyro

from data_pipelines.cloud import place
from data_pipelines.errors import UserError

# Type of an option that takes a local or a gs:// path. Options that take only local paths have type Path.
Place = Annotated[
    Path,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda texts: place(texts[0]),
        is_instance=lambda value: isinstance(value, PurePath),
        str_from_instance=lambda value: [str(value)],
    ),
]
# tyro joins the lines of a field's docstring only where they are not indented, as those in a class are
_joined = tyro._strings.remove_single_line_breaks
tyro._strings.remove_single_line_breaks = lambda text: _joined(inspect.cleandoc(text))

Options = TypeVar("Options")
FOREIGN = re.compile(r"([a-z][a-z0-9+.-]*:)/")  # a URL as pathlib writes it: gs:/ for gs://
RULE = re.compile(r"[─-]{3}")
PLAIN_WORDS = (  # a message of tyro or Python -> a plain one
    (r"^Error parsing (recipe\.\w+|options|recipe): ", ""),
    (r"Error parsing (--[\w.-]+): invalid literal for int\(\) with base 10: (.+)", r"\1 \2: give a whole number"),
    (r"Error parsing (--[\w.-]+): could not convert string to float: (.+)", r"\1 \2: give a number"),
    (r"Error parsing (--[\w.-]+): Could not find valid parse for arguments: \[(.+)\]", r"\1 \2: give other values"),
    (r"Missing value for argument '(--[\w.-]+)'\. Expected \d+ values?", r"\1: is given no value; give one"),
    (r"invalid choice (.+?) for argument '(--[\w.-]+)'\. Expected one of \((.+)\)", r"\2 \1: use one of \3"),
)


def end_with(main: Callable[[list[str]], int]) -> NoReturn:
    """End this process with the exit status of `main`, or print its UserError and end with that error's status. If the
    reader of stdout has gone, as `head` does, end with 1 and print nothing."""
    try:
        try:
            status = main(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, 0)  # POLLERR needs no mask; the broken pipe may also be a network connection
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        sys.exit(1)
    sys.exit(status)


def dispatch(arguments: list[str], usage: str, commands: Iterable[str], run: Callable[..., int | None]) -> int:
    """Run the command that the first argument names: run(command, remaining arguments). Returns its exit status and
    prints its UserError. Without a command, or for --help, prints the usage."""
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        print(usage)
        return 0
    try:
        if command not in commands:
            raise UserError(unknown("unknown command", command, commands))
        return run(command, rest) or 0
    except UserError as error:
        print("error:", " ".join(str(error).split("\n")), file=sys.stderr)  # a value may contain a line break
        return error.status


def parse(options: type[Options], arguments: Sequence[str], prog: str, default: Options | None = None) -> Options:
    """Parse the arguments into options. Raises UserError; --help prints the help and exits with 0."""
    keywords = {"prog": prog, "config": (tyro.conf.AvoidSubcommands,)} | ({"default": default} if default else {})
    actions = tyro.extras.get_parser(options, **keywords)._option_string_actions.items()
    # Option -> whether it takes several values at once. If another option is repeated, its last value counts
    known = {name: action.nargs in ("*", "+") for name, action in actions if name.startswith("--")}
    option = ""
    given: set[str] = set()
    for argument in arguments:
        if argument.startswith("--"):
            option = argument.split("=")[0].replace("_", "-")
            if option not in known:
                raise UserError(unknown(f"{prog}: unknown option", option, known))
            if option in given and known[option]:
                raise UserError(f"{option}: is given twice; give it once, with all its values")
            given.add(option)
        if argument == "" or argument.startswith("--") and argument.endswith("="):
            raise UserError(f"{option or prog}: is given no value; give one, or leave it out")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parsed = tyro.cli(options, args=arguments, **keywords)
    except SystemExit as exit:
        if not exit.code:
            raise
        raise UserError(f"{prog}: {_one_line(printed.getvalue())}; see --help") from None
    _check_local(parsed)
    return parsed


def _check_local(parsed) -> None:
    """Raise UserError for a URL such as gs:// where only a local path works: it would become a folder named gs:."""
    for field in dataclasses.fields(parsed):
        value = getattr(parsed, field.name)
        if isinstance(value, Path) and (found := FOREIGN.match(str(value))):
            name, rest = field.name.replace("_", "-"), str(value)[found.end() :]
            raise UserError(f"--{name} {found[1]}//{rest}: give a local path")
        if dataclasses.is_dataclass(value):  # grouped options, such as a recipe's fields
            _check_local(value)


def as_option(field: str, value: object) -> str:
    """Return a field's value in the form that `parse` takes: objective.next_sentence, False ->
    --objective.no-next-sentence."""
    group, dot, name = field.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{group}{dot}{'' if value else 'no-'}{name}"
    values = value if isinstance(value, tuple | list) else [value]
    return shlex.join([f"--{group}{dot}{name}", *map(str, values)])


def unknown(what: str, name: str, known) -> str:
    """Return 'WHAT NAME; did you mean ...?'."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{what} {name}; " + (f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(known))}")


def _one_line(report: str) -> str:
    """Return the message in tyro's report: the text from its first rule, which may hold the title, to the next one."""
    below = list(itertools.dropwhile(lambda row: not RULE.search(row), report.splitlines()))[1:]
    message = itertools.takewhile(lambda row: not RULE.search(row), below)
    line = " ".join(row.strip("│ ") for row in message).strip().removesuffix(".")
    if line.startswith("Missing from"):
        needed = re.split(r"\s*\(required\)\s*", line.partition(": ")[2])
        options = [text.split()[:2] if text.startswith("--") else [text.partition(" ")[2]] for text in needed if text]
        return f"missing: {', '.join(' '.join(words).rstrip('.') for words in options)}"
    for pattern, plain in PLAIN_WORDS:
        line = re.sub(pattern, plain, line)
    return line
