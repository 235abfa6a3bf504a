"""constraints.txt names the one version of everything that set-up and launch install, for both lines of Pythons."""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from data_pipelines.prepare.partial import LIBRARIES
from pretrain.trackers import TRACKERS as TRACKER_NAMES

ROOT = Path(__file__).parent.parent
LOCK, BEAM_LOCK = ROOT / "constraints.txt", ROOT / "constraints-beam.txt"
PYTHONS = ("3.11", "3.12", "3.13")
HERE = ".".join(map(str, sys.version_info[:2]))
BEAM = ROOT / "requirements-beam.txt"
TRACKERS = {ROOT / f"requirements-{name}.txt" for name in TRACKER_NAMES}  # what a user has of them, beside the lock
REQUIREMENTS = sorted({*ROOT.glob("requirements*.txt")} - {BEAM} - TRACKERS)
ACCELERATORS = "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt"


def read(path: Path, python: str) -> list[Requirement]:
    """What a file asks for on a version of Python."""
    lines = [line for line in path.read_text().splitlines() if line[:1] not in ("", "#", "-")]
    every = [Requirement(line) for line in lines]
    return [one for one in every if one.marker is None or one.marker.evaluate({"python_version": python})]


def locked(python: str, lock: Path = LOCK) -> dict[str, str]:
    """Name -> version; each once."""
    pinned = [(one.name, re.fullmatch("==([^*]+)", str(one.specifier))[1]) for one in read(lock, python)]
    assert len(dict(pinned)) == len(pinned)
    return dict(pinned)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_every_requirement_is_locked_at_a_version_that_it_allows(path, python):
    wanted, versions = read(path, python), locked(python)
    assert len(wanted) > 0
    assert [str(one) for one in wanted if not one.specifier.contains(versions[canonicalize_name(one.name)])] == []


def test_each_tracker_is_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    for name, path in zip(sorted(TRACKER_NAMES), sorted(TRACKERS), strict=True):
        assert extras["optional-dependencies"][name]["file"] == [path.name]
        assert [one.name for one in read(path, HERE)] == [name]


@pytest.mark.parametrize("python", PYTHONS)
def test_beams_environment_is_locked_and_cuts_and_tokenises_text_as_the_other_does(python):
    ours, versions = locked(python), locked(python, BEAM_LOCK)
    wanted = read(BEAM, python)
    assert [str(one) for one in wanted if not one.specifier.contains(versions[canonicalize_name(one.name)])] == []
    for name in LIBRARIES:
        assert versions[name] == ours[name]


@pytest.mark.parametrize("python", PYTHONS)
def test_what_accelerators_need_is_locked_with_its_jax(python):
    versions = locked(python)
    assert set(ACCELERATORS) <= set(versions)
    assert versions["jaxlib"] == versions["jax-cuda12-plugin"] == versions["jax-cuda12-pjrt"] == versions["jax"]


def test_set_up_installs_nothing_but_locked_versions():
    makefile = (ROOT / "Makefile").read_text()
    assert "INSTALL := $(BIN)/pip install --quiet -c constraints.txt\n" in makefile
    others = [line.strip() for line in makefile.splitlines() if re.match(r"\t\$\((BIN|BEAM)\)\S*/pip", line)]
    free = [line for line in others if line.split()[-1] != "pip" and "--upgrade-strategy" not in line]
    assert free == ["$(BEAM)/bin/pip install --quiet -c constraints-beam.txt -r requirements-beam.txt"]
    assert makefile.count("\t$(INSTALL) ") == 4
    for rule in re.findall(r"^\$\(VENV\)/installed-.*", makefile, re.M):
        assert "constraints.txt" in rule  # a new version is installed where the old one is


@pytest.mark.skipif(not (Path(sys.prefix) / "installed-dev").exists(), reason="not an environment that make made")
def test_what_is_installed_is_what_is_locked():
    for name, wanted in locked(HERE).items():
        try:
            assert version(name).partition("+")[0] == wanted, name
        except PackageNotFoundError:
            continue  # of another extra
