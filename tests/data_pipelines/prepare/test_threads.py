"""Threads of one process make parts, as Apache Beam's workers do."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data_pipelines.durable import ours
from data_pipelines.prepare.parts import read_encoder
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers import stored
from tests.data_pipelines.prepared import write_character_vocabulary


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    stored.save(stored.load(str(write_character_vocabulary(tmp_path / "vocab.txt")), True, True), tmp_path / "made")
    return tmp_path / "made" / "tokenizer.json"


@pytest.fixture(autouse=True)
def eager_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_encode_what_one_encodes(tokenizer):
    texts = [[f"w{thread}x{word} common{word}" for word in range(300)] for thread in range(4)]
    alone = Encoder(stored.load(tokenizer.parent).tokenizer)
    wanted = [alone.tokens(some) for some in texts]

    def encode(some):
        return [read_encoder(tokenizer).tokens([text])[0] for text in some]

    with ThreadPoolExecutor(4) as threads:
        for got, right in zip(threads.map(encode, texts), wanted, strict=True):
            assert all(map(np.array_equal, got, right))


def test_threads_write_under_names_of_their_own():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(ours).result() != ours()
