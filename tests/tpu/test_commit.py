"""The commit of the code is known on the machine that has .git, and on those that it is sent to."""

import subprocess
import tarfile

import pytest

from tpu import launch
from tpu.commit import commit


def git(root, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    done = subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def committed(checkout):
    git(checkout, "commit", "-q", "-m", "first", "--", "Makefile", "tpu")
    git(checkout, "rm", "-q", "--cached", "gone.txt")
    return checkout


def test_a_commit_and_whether_files_differ_from_it(committed):
    head = git(committed, "rev-parse", "HEAD")
    git(committed, "tag", "v1")
    assert commit(committed) == head
    (committed / "Makefile").write_text("changed")
    assert commit(committed) == f"{head}-dirty"


def test_the_commit_travels_with_the_code(committed, tmp_path):
    (committed / "Makefile").write_text("changed")
    archive = launch.pack(committed, tmp_path / "code.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "code", filter="data")
    assert commit(tmp_path / "code") == commit(committed) == git(committed, "rev-parse", "HEAD") + "-dirty"


def test_without_git_and_within_another_repository_nothing_is_known(checkout, tmp_path, monkeypatch):
    assert commit(tmp_path) is commit(checkout / "tpu") is None
    assert commit(checkout) is None  # nothing is committed yet
    monkeypatch.setenv("PATH", "")
    assert commit(checkout) is None
