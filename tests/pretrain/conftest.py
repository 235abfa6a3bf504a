"""What tests of several files train."""

import io

import pytest
from rich.console import Console

from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from pretrain.training.run import run
from tests.pretrain import tiny, toys
from tests.pretrain.hugging_face_folders import configs, exported, tokenizer_path, tokenizers  # noqa: F401
from tests.texts import write_texts


@pytest.fixture
def registered(monkeypatch):
    toys.register(monkeypatch)


@pytest.fixture(scope="session")
def uninterrupted(corpus_path, tmp_path_factory):
    """The work directory of a tiny BERT after 12 steps, with a checkpoint every 4. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    run(tiny.bert(steps=12), tiny.options(corpus_path, workdir, log_every=4, checkpoint_every=4))
    return workdir


@pytest.fixture(scope="session")
def bert_run(corpus_path, tmp_path_factory):
    """The work directory of a tiny BERT after few steps. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("bert") / "run"
    run(tiny.bert(steps=4), tiny.options(corpus_path, workdir, log_every=4, checkpoint_every=4))
    return workdir


@pytest.fixture(scope="session")
def electra_run(corpus_path, tmp_path_factory):
    """The work directory of a tiny ELECTRA that has not trained. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("electra") / "run"
    tiny.begun(tiny.electra(), tiny.options(corpus_path, workdir))
    return workdir


@pytest.fixture(scope="session")
def bytes_path(tmp_path_factory):
    """A small corpus of byte-level BPE with GPT-2's end token. Tests must not change it."""
    folder = tmp_path_factory.mktemp("bytes")
    source = write_texts(folder / "texts", documents=60, seed=0)
    options = {"tokenizer": "bpe", "specials": "gpt2", "vocab_size": 340, "heldout": 0.1, "processes": 1}
    prepare(Prepare((f"text:{source}",), folder / "corpus", **options), Console(file=io.StringIO()))
    return folder / "corpus"


@pytest.fixture(scope="session")
def gpt2_run(bytes_path, tmp_path_factory):
    """The work directory of a tiny GPT-2 after few steps. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("gpt2") / "run"
    run(tiny.gpt2(steps=4), tiny.options(bytes_path, workdir, log_every=4, checkpoint_every=4))
    return workdir
