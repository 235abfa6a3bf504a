"""SIGTERM and SIGINT: before which step a run stops, when it ends at once, and what a terminal then shows."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from pretrain.commands import planning
from pretrain.training.signals import EXIT_STOPPED, StopRequest, stop_request
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

IN_ONE_LONG_CALL = """
import ctypes
from data_pipelines.progress import busy
from pretrain.training.signals import stop_request
with stop_request() as stop:
    stop.reached(0) if {begun} else None
    with busy("restoring"):
        lock = ctypes.create_string_buffer(64)
        while True:  # the second call never returns to the interpreter, as a compilation does not for minutes
            ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize("begun", [False, True])
def test_the_first_signal_before_the_first_step_or_a_second_one_ends_the_process_at_once_whatever_it_is_doing(begun):
    main, terminal = pty.openpty()
    command = [sys.executable, "-c", IN_ONE_LONG_CALL.format(begun=begun)]
    process = subprocess.Popen(command, stdout=terminal, env=os.environ | {"TERM": "xterm"})
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
    assert (b"before the first step" in shown) == (not begun)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")  # the terminal has its cursor again


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
    assert (done.returncode, done.stderr) == (75, f"{name}: stopped before there was anything to save\n")


def test_a_plan_ends_at_an_interrupt_without_waiting_for_the_compiler(monkeypatch):
    seen, before = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(planning, "plan_command", lambda _: seen.append(signal.getsignal(signal.SIGINT)) or 0)
    try:
        assert tpu_main(["plan", "bert-tiny"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_DFL]
