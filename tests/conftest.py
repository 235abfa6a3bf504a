"""What tests of several packages share."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from data_pipelines.prepare import Prepare, prepare
from tests.texts import write_texts


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory) -> Path:
    """A corpus as `prepare` writes it: 200 small documents, 195 tokens in its vocabulary. Tests must not change it."""
    folder = tmp_path_factory.mktemp("corpus")
    source = write_texts(folder / "texts", documents=200, seed=0)
    options = Prepare((f"text:{source}",), folder / "corpus", vocab_size=300, heldout=0.1, processes=1)
    prepare(options, Console(file=io.StringIO()))
    return folder / "corpus"
