"""What a terminal shows between two lines of figures, and a pipe does not."""

import io
import time

import pytest
from rich.console import Console

from pretrain.storage import journal
from pretrain.storage.journal import Journal, open_journal
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.run import run
from tests.pretrain import tiny, toys


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """(terminal or pipe) -> (a journal of 10 steps, what it writes to the screen)."""
    opened = []

    def opened_on(terminal: bool):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=120)
        monkeypatch.setattr(journal, "Console", lambda **_: console)
        opened.append(open_journal(RunDirectory(tmp_path), 0, 10))
        return opened[-1], screen

    yield opened_on
    for one in opened:
        one.close()


def shows(screen, *texts) -> bool:
    """Whether all are written to the screen, at once or, by the thread that draws, some time later."""
    deadline = time.monotonic() + 60
    while not all(text in screen.getvalue() for text in texts):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_terminal_is_told_what_is_done_and_for_how_long_while_nothing_returns(shown):
    writer, screen = shown(True)
    writer.doing("compiling phase 1")  # one long call
    assert shows(screen, "compiling phase 1", "0:00:00", "0:00:01")


def test_a_terminal_counts_steps_between_lines_of_figures_with_their_rate_and_the_time_left(shown):
    writer, screen = shown(True)
    for step in (1, 2, 3):
        writer.progress(step)
        time.sleep(0.01)
    assert shows(screen, "training", "3/10", "/s", "left")


def test_a_pipe_gets_no_bar(shown):
    writer, screen = shown(False)
    writer.doing("compiling phase 1")
    writer.progress(3)
    writer.say("a line")
    assert screen.getvalue() == "a line\n"


def test_a_run_tells_of_every_step_and_of_what_comes_between(corpus_path, tmp_path, monkeypatch):
    told = []
    toys.register(monkeypatch)
    monkeypatch.setattr(Journal, "doing", lambda self, what: told.append(what))
    monkeypatch.setattr(Journal, "progress", lambda self, step: told.append(step))
    run(toys.recipe(steps=4), tiny.options(corpus_path, tmp_path / "run", log_every=4, eval_every=2))
    assert told == ["compiling phase 1", 1, 2, "evaluating", 3, 4, "evaluating"]
