"""Mistakes on the command line: one line with the cure, exit status 2."""

import dataclasses
import os
import subprocess
import sys

import pytest

from data_pipelines import __main__ as program
from data_pipelines.command_line import end_with, parse
from data_pipelines.errors import PassingError, UserError

OUT = ["prepare", "--source", "builtin", "--out", "corpus"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prepair"], "unknown command prepair; did you mean prepare?"),
        (["qqq"], "unknown command qqq; use one of prepare, segment, show"),
        (["prepare", "--sorce", "builtin"], "unknown option --sorce; did you mean --source?"),
        ([*OUT, "--vocab-sizes=3"], "unknown option --vocab-sizes; did you mean --vocab-size?"),
        ([*OUT, "--vocab-size", "many"], "prepare: --vocab-size 'many': give a whole number; see"),
        ([*OUT, "--heldout", "much"], "prepare: --heldout 'much': give a number; see"),
        ([*OUT, "--documents", "page"], "--documents 'page': use one of 'file'"),
        (["prepare", "--source", "builtin"], "prepare: missing: --out PATH; see --help"),
        (["prepare", "--out", "corpus"], "--source is missing; give at least one"),
        ([*OUT, "--heldout", "0.1", "--heldout"], "prepare: --heldout: is given no value; give one; see"),
        ([*OUT, "stray"], "Unrecognized options: stray"),
        (["show"], "show: missing: The corpus: "),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, said):
    assert program.main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize("error", [UserError("no text"), PassingError("the bucket is away")])
def test_a_command_ends_with_the_status_of_its_error(error, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setitem(program.COMMANDS, "prepare", fail)
    assert program.main(["prepare"]) == error.status
    assert capsys.readouterr().err == f"error: {error}\n"
    with pytest.raises(SystemExit) as ended:
        end_with(fail)
    assert ended.value.code == error.status and capsys.readouterr().err == f"error: {error}\n"


def test_help_lists_commands_and_options(capsys):
    assert program.main([]) == 0
    assert "show CORPUS" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        program.main(["prepare", "--help"])
    assert ended.value.code == 0
    assert "--vocab-size INT" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True)
class Example:
    """Do a thing."""

    number: int = 0
    """How many of the things are done, which is a text of more
    than a line."""


def test_the_lines_of_an_option_s_text_are_joined(capsys):
    with pytest.raises(SystemExit):
        parse(Example, ["--help"], "example")
    assert "more than" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["data_pipelines prepare", "pretrain run bert-tiny"])
def test_a_reader_that_leaves_early_sees_no_traceback(command):
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", *command.split(), "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_an_interrupt_says_how_to_continue(capsys, monkeypatch):
    def interrupted(arguments, console):
        raise KeyboardInterrupt

    monkeypatch.setitem(program.COMMANDS, "prepare", interrupted)
    assert program.main(["prepare"]) == 130
    assert "start the same command again to continue" in capsys.readouterr().err
