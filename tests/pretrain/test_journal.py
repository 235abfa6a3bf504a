"""What a terminal shows between two lines of figures, and a pipe does not."""

import io
import time

import pytest
from rich.console import Console

from pretrain.storage import journal
from pretrain.storage.journal import Journal, line_of, open_journal, short_line
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


FIGURES = {"loss": 4.26371, "mlm_loss": 3.58554, "mlm_accuracy": 0.375229, "next_sentence_loss": 0.678173}
SPEED = {"gradient_norm": 2.19044, "tokens_per_s": 8473.58, "seconds_left": 2800.0}


def test_a_line_is_broken_between_figures_and_names_what_is_left():
    assert short_line("train", 5000, FIGURES | SPEED, 60).splitlines() == [
        "train    5000  loss 4.264  mlm_loss 3.586",
        "               mlm_accuracy 0.3752",
        "               next_sentence_loss 0.6782  8,474 tokens/s",
        "               0:46:40 left",
    ]
    assert len(short_line("train", 5000, FIGURES | SPEED).splitlines()) == 1
    assert "gradient_norm 2.1904" in line_of("train", 5000, FIGURES | SPEED)


def test_the_only_term_of_a_loss_is_not_printed_twice():
    assert (
        short_line("eval", 8, {"loss": 4.5, "lm_loss": 4.5, "perplexity": 90.0})
        == " eval       8  loss 4.5  perplexity 90"
    )
    assert "lm_loss 9" in short_line("eval", 8, {"loss": 4.5, "lm_loss": 9.0})
