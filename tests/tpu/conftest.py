"""A cloud that is not there, and time that does not pass."""

import os
import subprocess
import time

import pytest

from tests.tpu.cloud import Cloud
from tpu import launch


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """gcloud on PATH is the stand-in."""
    made = Cloud(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return made


@pytest.fixture
def naps(monkeypatch):
    """The seconds that the program would have slept."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The code to copy is a small git repository with a file that git does not know."""
    root = tmp_path / "checkout"
    (root / "tpu").mkdir(parents=True)
    (root / "tpu" / "worker.sh").write_text((launch.ROOT / "tpu" / "worker.sh").read_text())
    (root / "Makefile").write_text("setup:\n\ttrue\n")
    (root / "gone.txt").write_text("deleted before the launch")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", root, *command], check=True)
    (root / "gone.txt").unlink()
    (root / "secret.txt").write_text("not tracked")
    monkeypatch.setattr(launch, "ROOT", root)
    return root
