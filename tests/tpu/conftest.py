"""A cloud that is not there, and time that does not pass."""

import subprocess

import pytest

from tests.tpu.cloud import INSTALLING, Cloud
from tpu import gcloud, launch
from tpu.__main__ import main


@pytest.fixture
def cloud(tmp_path, monkeypatch, checkout):
    """Every gcloud command goes there."""
    made = Cloud(tmp_path / "cloud")
    monkeypatch.setattr(gcloud.Gcloud, "execute", lambda self, command: made.execute(command, self.folder))
    monkeypatch.setattr(gcloud.Gcloud, "sleep", lambda self, seconds: made.sleep(seconds))
    return made


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The code to copy is a small git repository with a file that git does not know."""
    root = tmp_path / "checkout"
    (root / "tpu").mkdir(parents=True)
    (root / "tpu" / "vm.sh").write_text((launch.ROOT / "tpu" / "vm.sh").read_text())
    (root / "Makefile").write_text("setup:\n\ttrue\n")
    (root / "gone.txt").write_text("deleted before the launch")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", root, *command], check=True)
    (root / "gone.txt").unlink()
    (root / "secret.txt").write_text("not tracked")
    monkeypatch.setattr(launch, "ROOT", root)
    return root


@pytest.fixture
def end(cloud, capsys):
    """Launch to the end -> status, what it said, the run's lines as they were shown."""

    def launched(*command):
        status = main([*command])
        printed = capsys.readouterr()
        said = printed.out.replace(INSTALLING, "").splitlines()
        lines = [line for line in said if not line.startswith("[launch]")]
        return status, printed.out + printed.err, lines

    return launched
