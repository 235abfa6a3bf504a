"""What tests of the data pipelines share."""

import random

import pytest
from hypothesis import HealthCheck, settings

from data_pipelines.formats import source
from data_pipelines.prepare import plan
from tests.data_pipelines.prepare.small import MIB, UNIT

# The same examples in every run: what fails fails again
settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of 40 files, 60 kB: 6 parts of the small size of `prepare.small`."""
    folder, chance = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(40):
        words = chance.choices(["alpha", "beta", "Gamma", "delta,", "epsilon's", "zeta.", "Eta!"], k=250)
        (folder / f"{number:02}.txt").write_text(f"Document {number}. " + " ".join(words))
    return folder


@pytest.fixture
def small(monkeypatch):
    """Units and parts of some kilobytes."""
    monkeypatch.setattr(source, "SHARD", UNIT)
    monkeypatch.setattr(plan, "MIB", MIB)


@pytest.fixture
def a_txt(tmp_path):
    """A file a.txt in the folder of the test."""
    (tmp_path / "a.txt").write_text("Some text.")
