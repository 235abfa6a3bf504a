"""A cloud that is not there, and time that does not pass; tests that need a process of their own."""

import os
import shutil
import subprocess

import pytest

from tests.tpu.cloud import INSTALLING, Cloud
from tests.tpu.own_process import REPORTS, Reporting, Started
from tpu import gcloud, launch
from tpu.__main__ import main

STARTED = pytest.StashKey[dict]()


@pytest.fixture
def cloud(tmp_path, monkeypatch, checkout):
    """Every gcloud command goes there."""
    made = Cloud(tmp_path / "cloud")
    monkeypatch.setattr(gcloud.Gcloud, "execute", lambda self, command: made.execute(command, self.folder))
    monkeypatch.setattr(gcloud.Gcloud, "sleep", lambda self, seconds: made.sleep(seconds))
    return made


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """A small git repository. Tests must not change it."""
    root = tmp_path_factory.mktemp("repository") / "checkout"
    (root / "tpu").mkdir(parents=True)
    (root / "tpu" / "vm.sh").write_text((launch.ROOT / "tpu" / "vm.sh").read_text())
    (root / "Makefile").write_text("setup:\n\ttrue\n")
    (root / "gone.txt").write_text("deleted before the launch")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", root, *command], check=True)
    return root


@pytest.fixture
def checkout(repository, tmp_path, monkeypatch):
    """The code to copy is a copy of it, without a file that git knows and with one that it does not."""
    root = shutil.copytree(repository, tmp_path / "checkout")
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


def pytest_configure(config):
    does = "one started process runs the tests of this file, with simulated devices and an environment of its own"
    config.addinivalue_line("markers", f"own_process(devices, **environment): {does}")
    if REPORTS in os.environ:
        config.pluginmanager.register(Reporting(config, os.fdopen(int(os.environ[REPORTS]), "w")))


def pytest_runtest_protocol(item, nextitem):
    mark = item.get_closest_marker("own_process")
    if mark is None or REPORTS in os.environ:
        return None
    started = item.session.stash.setdefault(STARTED, {})
    if item.path not in started:
        items = [one for one in item.session.items if one.path == item.path]
        started[item.path] = Started(items, **mark.kwargs)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in started[item.path].reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # folders of the test before, which the next one is not in
    return True
