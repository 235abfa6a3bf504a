"""The script on the hosts, run here with a home of its own; in the place of Python it finds a small program."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.tpu.cloud import HERE, NOT_FOUND, vm
from tpu.__main__ import main

# Prints its arguments, ends well once $HOME/finish exists; SIGTERM: a checkpoint and status 75, unless it is deaf.
PROGRAM = """#!/usr/bin/env bash
[ ! -e "$HOME/deaf" ] && trap 'echo checkpoint; exit 75' TERM || trap '' TERM
echo "$PWD: $*"
until [ -e "$HOME/finish" ]; do sleep 0.05; done
echo done
"""
MAKEFILE = """setup:
	@echo $(ACCELERATOR) $(PYTHON) $(VENV) > $(HOME)/made
	@mkdir -p $(VENV)/bin && cp program $(VENV)/bin/python
"""


@pytest.fixture
def home(tmp_path, monkeypatch, checkout):
    """A host whose Python is new enough, with the code at hand to be copied or in place."""
    made = tmp_path / "home"
    made.mkdir()
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    write_program(tmp_path / "bin" / "python3", "#!/bin/sh\nexit 0\n")
    write_program(checkout / "program", PROGRAM)
    (checkout / "Makefile").write_text(MAKEFILE)
    subprocess.run(["git", "-C", checkout, "add", "."], check=True)
    yield made
    if (made / "run" / "code").exists():
        worker("kill", "0")


def write_program(path: Path, text: str):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def worker(*arguments):
    """Run the script -> (exit status, stdout, stderr)."""
    script = Path(os.environ["HOME"]) / "run" / "code" / "tpu" / "worker.sh"
    done = subprocess.run(["bash", script, *arguments], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


def state():
    status, out, err = worker("report")
    assert (status, err) == (0, "")
    return out.strip().partition(": ")[2]


@pytest.fixture
def installed(home, checkout):
    (home / "run").mkdir()
    (checkout).rename(home / "run" / "code")
    assert worker("setup")[0] == 0
    return home


def test_a_launch_from_end_to_end(cloud, naps, home, capsys):
    """Only the cloud is not real here: the code is copied, unpacked, installed, started, followed."""
    (home / "finish").touch()
    cloud.on("tpu-vm describe", NOT_FOUND, vm("READY"))
    for text in ("scp", "ssh"):
        cloud.on(text, HERE)
    cloud.otherwise_healthy()
    arguments = ["--name", "n", "--zone", "z", "--type", "v6e-8", "--bucket", "gs://b", "--optimizer.name", "lamb"]
    assert main(["launch", "bert-tiny", *arguments]) == 0
    run = "-m pretrain run bert-tiny --corpus gs://b/corpus --workdir gs://b/n --optimizer.name lamb"
    assert f"{home}/run/code: {run}\ndone\n" in capsys.readouterr().out
    assert (home / "made").read_text() == f"tpu python3 {home}/run/venv\n"
    assert state() == "ended 0"


def test_a_host_with_an_old_python_gets_one_from_uv(home, installed, tmp_path):
    write_program(tmp_path / "bin" / "python3", "#!/bin/sh\nexit 1\n")
    write_program(tmp_path / "bin" / "uv", "#!/bin/sh\necho $* >> $HOME/asked\n[ $2 != find ] || echo /new/python\n")
    assert worker("setup") == (0, "", "")
    assert (home / "asked").read_text() == "python install --quiet 3.12\npython find 3.12\n"
    assert (home / "made").read_text() == f"tpu /new/python {home}/run/venv\n"


def test_start_returns_while_the_run_goes_on_and_is_not_disturbed_by_a_second_start(installed):
    assert worker("start", "a", "b") == (0, "", "")
    assert state() == "running"
    first = (installed / "run" / "pid").read_text()
    assert os.getsid(int(first)) == int(first)  # a session of its own, which the end of ssh does not touch
    assert worker("start", "a", "b") == (0, "", "")
    assert (installed / "run" / "pid").read_text() == first
    status, _, complaint = worker("start", "a", "c")
    assert status == 3
    assert "another run is going on here: python -m pretrain run a b" in complaint
    (installed / "finish").touch()
    assert worker("follow", "0")[1].splitlines()[1:] == ["done"]
    assert state() == "ended 0"


def test_arguments_arrive_as_they_were_given(installed):
    write_program(installed / "run" / "venv" / "bin" / "python", "#!/bin/sh\nprintf '<%s>' \"$@\"\n")
    assert worker("start", "a b", "*", "c")[0] == 0
    while state() == "running":
        time.sleep(0.02)
    assert (installed / "run" / "log.txt").read_text() == "<-m><pretrain><run><a b><*><c>"


def test_follow_begins_after_the_lines_that_were_shown(installed):
    (installed / "finish").touch()
    worker("start", "a")
    assert worker("follow", "1")[1] == "done\n"
    assert worker("lines")[1].strip() == "2"
    worker("start", "a")
    assert worker("follow", "0")[1].count("done") == 1  # a log of its own


def test_stop_lets_the_run_write_its_checkpoint(installed):
    worker("start", "a")
    while "-m pretrain" not in (installed / "run" / "log.txt").read_text():
        time.sleep(0.02)
    assert worker("stop", "20")[1].endswith(": stopped 75\n")
    assert "checkpoint" in (installed / "run" / "log.txt").read_text()
    worker("start", "a")
    assert state() == "running"  # no longer stopped


def test_a_run_that_does_not_listen_is_reported_and_can_be_killed(installed):
    (installed / "deaf").touch()
    worker("start", "a")
    while "-m pretrain" not in (installed / "run" / "log.txt").read_text():
        time.sleep(0.02)
    assert worker("stop", "0")[1].endswith(": running\n")
    assert worker("kill", "0")[1].endswith(": stopped 137\n")


def test_a_host_that_was_switched_off_has_lost_its_run(installed):
    assert state() == "idle"
    worker("start", "a")
    python = int((installed / "run" / "python.pid").read_text())
    for pid in (int((installed / "run" / "pid").read_text()), python):
        os.kill(pid, signal.SIGKILL)
    while state() == "running":
        time.sleep(0.02)
    assert state() == "lost"
