"""A run says with which versions it was started, and when they are others than before."""

import json
import re

import jax

from pretrain.storage import run_directory
from pretrain.storage.run_directory import versions
from pretrain.training.run import run
from tests.pretrain import tiny, toys


def test_versions_of_all_that_requirements_name():
    found = versions()
    assert found["jax"] == jax.__version__ and found["jaxlib"] == jax.lib.__version__
    lines = (run_directory.ROOT / "requirements.txt").read_text().splitlines()
    names = {re.split(r"[=>;\[]", line)[0] for line in lines if line and not line.startswith("#")}
    assert len(names) > 15 and names < set(found)


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
