"""Mistakes on the command line: one line with the cure, exit status 2."""

import os
import subprocess
import sys

import pytest

from data_pipelines import __main__ as program
from data_pipelines.command_line import end_with, parse
from data_pipelines.errors import PassingError, UserError
from data_pipelines.prepare.options import Prepare

OUT = ["prepare", "--source", "builtin", "--out", "corpus"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prepair"], "unknown command prepair; did you mean prepare?"),
        (["qqq"], "unknown command qqq; use one of prepare, show"),
        (["prepare", "--sorce", "builtin"], "unknown option --sorce; did you mean --source?"),
        ([*OUT, "--vocab-sizes=3"], "unknown option --vocab-sizes; did you mean --vocab-size?"),
        ([*OUT, "--vocab-size", "many"], "--vocab-size: invalid literal for int() with base 10: 'many'"),
        ([*OUT, "--documents", "page"], "invalid choice 'page' for argument '--documents'. Expected one of ('file'"),
        (["prepare", "--source", "builtin"], "Missing from python -m data_pipelines prepare: --out"),
        (["prepare", "--out", "corpus"], "--source is missing; give at least one"),
        ([*OUT, "stray"], "Unrecognized options: stray"),
        (["show"], "Missing from python -m data_pipelines show: STR"),
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


def test_help_lists_commands_and_options(capsys):
    assert program.main([]) == 0
    assert "show CORPUS" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        program.main(["prepare", "--help"])
    assert ended.value.code == 0
    assert "--vocab-size INT" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["data_pipelines", "data_pipelines prepare", "pretrain run bert-tiny", "tpu"])
def test_a_reader_that_leaves_early_sees_no_traceback(command):
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", *command.split(), "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("error", [UserError("--rows 0: at least 1"), PassingError("the bucket is away")])
def test_what_a_user_can_put_right_is_one_line_and_its_status(error, capsys):
    def main(arguments):
        raise error

    with pytest.raises(SystemExit) as ended:
        end_with(main)
    assert ended.value.code == error.status and capsys.readouterr().err == f"error: {error}\n"


def test_another_pipe_that_breaks_is_an_error_as_before():
    def main(arguments):
        raise BrokenPipeError("a connection's")

    with pytest.raises(BrokenPipeError, match="a connection's"):
        end_with(main)


def test_every_option_arrives():
    given = ["--source", "text:a", "--source", "builtin", "--out", "c", "--tokenizer", "t", "--vocab-size", "5"]
    given += ["--cased", "--language", "no", "--documents", "blank-line", "--field", "f", "--undecodable", "skip"]
    given += ["--keep-accents", "--specials", "albert", "--heldout", "0.2", "--processes", "3", "--tfds-dir", "d"]
    given += ["--token-column", "2", "--label-column", "0", "--sentinels", "7", "--steps", "nfc", "tags"]
    given += ["--part-size", "64", "--part", "1/2", "--finish", "--append", "--runner", "spark"]
    given += ["--code", "Horror", "--code-field", "domain", "--end-of-text"]
    options = parse(Prepare, given, "prepare")
    assert options.source == ("text:a", "builtin")
    assert vars(options) | {"source": None, "out": str(options.out)} == {
        "source": None,
        "out": "c",
        "tokenizer": "t",
        "vocab_size": 5,
        "cased": True,
        "keep_accents": True,
        "specials": "albert",
        "language": ("no",),
        "documents": "blank-line",
        "field": ("f",),
        "undecodable": "skip",
        "heldout": 0.2,
        "processes": 3,
        "tfds_dir": "d",
        "sentinels": 7,
        "end_of_text": True,
        "steps": ("nfc", "tags"),
        "token_column": 2,
        "label_column": 0,
        "part_size": 64,
        "part": "1/2",
        "finish": True,
        "append": True,
        "runner": "spark",
        "code": ("Horror",),
        "code_field": "domain",
    }


def test_an_interrupt_says_how_to_continue(capsys, monkeypatch):
    def interrupted(arguments, console):
        raise KeyboardInterrupt

    monkeypatch.setitem(program.COMMANDS, "prepare", interrupted)
    assert program.main(["prepare"]) == 130
    assert "the same command continues" in capsys.readouterr().err
