"""A run says with which versions it was started, and when they are others than before."""

import json
import re
from importlib import metadata

import jax

from pretrain.commands.run import run
from pretrain.storage import environment
from pretrain.storage.environment import versions
from tests.pretrain import tiny, toys


def test_versions_of_all_that_requirements_name():
    found = versions()
    assert found["jax"] == jax.__version__ and found["jaxlib"] == jax.lib.__version__
    lines = (environment.ROOT / "requirements.txt").read_text().splitlines()
    names = {re.split(r"[=>;\[]", line)[0] for line in lines if line and not line.startswith("#")}
    assert len(names) > 15 and names < set(found)


def test_an_installed_package_knows_its_requirements_by_its_metadata(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    required = ['jax==0.10.2; python_version < "3.12"', "optax>=0.2.8", 'pytest>=9; extra == "dev"', "no-such>=1"]
    monkeypatch.setattr(metadata, "requires", lambda name: required if name == "pretrain" else None)
    found = versions()
    assert found["code"] is None and {"jax", "optax"} < set(found)
    assert not {"pytest", "no-such", "flax"} & set(found)


def test_a_run_that_goes_on_with_other_versions_says_so(corpus_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    go = lambda: run(toys.recipe(steps=1), tiny.options(corpus_path, tmp_path / "run"))
    assert go() == go() == 0
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["versions"] == versions()
    log = tmp_path / "run" / "log.txt"
    assert "since the last start" not in log.read_text()
    about["versions"]["jax"] = "0.0.1"
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    assert go() == 0
    assert f"since the last start: jax 0.0.1 -> {jax.__version__}; " in log.read_text()
