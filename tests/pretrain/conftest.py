"""What tests of several files train."""

import pytest

from tests.pretrain import tiny
from tests.pretrain.hugging_face_folders import configs, exported, tokenizer_path  # noqa: F401


@pytest.fixture(scope="session")
def uninterrupted(corpus_path, tmp_path_factory):
    """The work directory of the run `tiny.run_arguments`, which nothing disturbed. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    status, _, err = tiny.run_command(*tiny.run_arguments(corpus_path, workdir))
    assert status == 0, err
    return workdir
