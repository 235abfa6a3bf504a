"""SIGTERM and SIGINT: a checkpoint of the step at hand, exit status 75, and the same command goes on."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pretrain.commands import planning
from pretrain.training.signals import EXIT_STOPPED, StopRequest, stop_request
from tests.pretrain import tiny
from tests.pretrain.test_kills import reached
from tpu.__main__ import main as tpu_main


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_before_the_next_step_and_the_old_handlers_come_back(number):
    before = signal.getsignal(number)
    with stop_request() as stop:
        assert not stop.reached(3)
        signal.raise_signal(number)
        signal.raise_signal(number)  # at once: the same one, passed on by two programs
        while stop.signal is None:
            time.sleep(0.01)
        assert stop.signal == number.name and stop.reached(4)
    assert signal.getsignal(number) == before


def test_a_signal_that_comes_as_soon_as_it_is_caught_is_heard(monkeypatch):
    take, settled = signal.signal, threading.Event()

    def taken(number, handler):
        old = take(number, handler)
        if number == signal.SIGTERM and callable(handler):
            signal.raise_signal(number)
        return old

    monkeypatch.setattr(signal, "signal", taken)
    monkeypatch.setattr(StopRequest, "settle", lambda stop, name: settled.set())
    with stop_request():
        assert settled.wait(60)


def test_a_signal_to_all_is_no_second_one_where_another_process_heard_it_long_before(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with stop_request() as stop:
        stop.reached(3)
        stop.settle("SIGTERM")  # which the other process said
        signal.raise_signal(signal.SIGTERM)
    assert ended == []


def test_a_signal_that_comes_again_while_the_processes_settle_is_the_same_one(monkeypatch):
    def settle(stop, name):
        time.sleep(1.2)
        stop.signal = name

    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(StopRequest, "settle", settle)
    with stop_request():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.1)
        signal.raise_signal(signal.SIGTERM)
    assert ended == []


AGAIN = 1.5  # seconds between two signals, of which a busy machine may read the first so late that they are one

HEARD = """
import hashlib
from pretrain.training.signals import stop_request
with stop_request() as stop:
    stop.reached(0) if {begun} else None
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # C for many minutes, without the interpreter, as a compilation is
"""


def heard(begun):
    """A process that is busy in C gets SIGTERM, and again while it goes on -> its status, output, signals."""
    command = [sys.executable, "-c", HEARD.format(begun=begun)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    sent = 0
    while process.poll() is None and sent < 20:
        process.send_signal(signal.SIGTERM)
        sent += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(AGAIN)
    process.kill()
    return process.wait(), process.stdout.read(), sent


def test_before_the_first_step_a_signal_ends_the_process_at_once_whatever_it_is_doing():
    status, out, sent = heard(begun=False)
    assert status == EXIT_STOPPED and "before the first step" in out and sent < 5


def test_a_second_signal_a_while_later_ends_the_process_at_once():
    status, _, sent = heard(begun=True)
    assert status == 128 + signal.SIGTERM and 2 <= sent < 5


ON_A_TERMINAL = """
import time
from data_pipelines.progress import busy
from pretrain.training.signals import stop_request
with stop_request() as stop:
    stop.reached(0) if {begun} else None
    with busy("restoring"):
        time.sleep(60)
"""


@pytest.mark.parametrize("begun", [False, True])
def test_a_terminal_has_its_cursor_again_however_a_signal_ends_the_process(begun):
    main, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    command = [sys.executable, "-c", ON_A_TERMINAL.format(begun=begun)]
    process = subprocess.Popen(command, stdout=terminal, env=environment)
    os.close(terminal)
    shown, sent = b"", []
    with contextlib.suppress(OSError):  # the other side is closed
        while more := os.read(main, 1000):
            shown += more
            if b"restoring" in shown and (not sent or time.monotonic() > sent[-1] + AGAIN):
                process.send_signal(signal.SIGTERM)
                sent.append(time.monotonic())
    os.close(main)
    assert process.wait() == (128 + signal.SIGTERM if begun else EXIT_STOPPED) and begun < len(sent) < 5
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


# So that it is not through before a busy machine has sent the signal.
SLOWLY = """
import runpy, time
from pretrain.training import loop
at_once = loop.place_rows
def place_rows(*given):
    time.sleep(0.2)
    return at_once(*given)
loop.place_rows = place_rows
runpy.run_module("pretrain", run_name="__main__")
"""


def interrupted(corpus_path, workdir, number, step, *more):
    """Send a real run a signal after a step, as a terminal does: to the whole process group -> (status, output)."""
    arguments = tiny.run_arguments(corpus_path, workdir, "--checkpoint-every", 1000, *more)
    process = tiny.start(*arguments, program=("-c", SLOWLY))
    while not reached(workdir, step) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_run_stopped_twice_ends_as_if_it_never_was(corpus_path, tmp_path, uninterrupted):
    workdir, seen = tmp_path / "run", []
    for number, step, more in ((signal.SIGTERM, 3, ()), (signal.SIGINT, 12, ("--workers", 2))):
        status, out, err = interrupted(corpus_path, workdir, number, step, *more)
        assert status == EXIT_STOPPED == 75, err
        assert "Traceback" not in err
        stopped = int(tiny.final_state(workdir).step)
        assert f"{number.name}: saved step {stopped}" in out
        seen.append(stopped)
    assert 3 <= seen[0] < seen[1] < 40
    status, out, err = tiny.run_command(*tiny.run_arguments(corpus_path, workdir, "--workers", 1))
    assert (status, err) == (0, "")
    assert f"resuming from step {seen[1]}" in out
    assert tiny.equal(tiny.final_state(workdir), tiny.final_state(uninterrupted))


def test_a_signal_before_the_first_step_of_a_resumed_run_ends_it_and_loses_nothing(corpus_path, tmp_path):
    arguments = tiny.run_arguments(corpus_path, tmp_path / "run")
    assert tiny.run_command(*arguments, "--steps", 4)[0] == 0
    before = tiny.final_state(tmp_path / "run")
    process = tiny.start(*arguments)
    for line in process.stdout:
        if "resuming" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED, err
    if "before the first step" in out:  # and not a moment later
        assert tiny.equal(tiny.final_state(tmp_path / "run"), before)
    assert tiny.final_state(tmp_path / "run").step < 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_program_is_still_being_loaded_ends_it_without_a_stack(number, corpus_path, tmp_path):
    process = tiny.start(*tiny.run_arguments(corpus_path, tmp_path / "run"))
    handled = lambda: int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1], 16)
    while not handled() >> (signal.SIGTERM - 1) & 1:  # the second of the two that the program catches
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED and "Traceback" not in err, err
    assert not (tmp_path / "run" / "checkpoints").exists()


INTERRUPTED_IMPORT = """
import runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *rest):
        if name == "tyro":  # of what takes long
            signal.raise_signal(signal.SIGNAL)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("pretrain", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_the_program_is_imported_is_one_line_and_the_status_of_later_ones(name):
    code = INTERRUPTED_IMPORT.replace("SIGNAL", name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, f"{name}: ended before there was anything to save\n")


def test_a_plan_ends_at_an_interrupt_without_waiting_for_the_compiler(monkeypatch):
    seen, before = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(planning, "plan_command", lambda _: seen.append(signal.getsignal(signal.SIGINT)) or 0)
    try:
        assert tpu_main(["plan", "bert-tiny"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_DFL]
