"""What a tokenizer does not know is said, with the size that cures it."""

import re

import numpy as np
import pytest

from tests.data_pipelines.prepared import run


def text(path, kind):
    chance = np.random.default_rng(0)
    signs = [chr(0x4E00 + number) for number in range(600)]
    if kind == "wordlevel":
        signs = [f"word{number}" for number in range(600)]
    weights = 1 / np.arange(1, 601)
    path.write_text(" ".join(chance.choice(signs, 20_000, p=weights / weights.sum())))
    return f"text:{path}"


@pytest.mark.parametrize("kind", ["wordpiece", "wordlevel", "character-bpe"])
def test_the_size_that_is_said_cures(tmp_path, kind):
    source = text(tmp_path / "a.txt", kind)
    _, printed = run(tmp_path / "small", source, tokenizer=kind, vocab_size=100)
    share, size = re.search(r"([\d.]+)% of the tokens are unknown.* --vocab-size (\d+) would know", printed).groups()
    assert float(share) > 1
    _, printed = run(tmp_path / "large", source, tokenizer=kind, vocab_size=int(size))
    assert float(re.search(r"([\d.]+)% of the tokens are unknown to the tokenizer$", printed, re.M)[1]) < 0.1


def test_a_tokenizer_of_another_language_is_said(tmp_path):
    source = text(tmp_path / "a.txt", "wordpiece")
    _, printed = run(tmp_path / "out", source)
    assert "100.000% of the tokens are unknown to the tokenizer; look whether it is one for this language" in printed


def test_where_nothing_can_be_unknown_nothing_is_said(tmp_path):
    source = text(tmp_path / "a.txt", "bpe")
    _, printed = run(tmp_path / "out", source, tokenizer="bpe", specials="gpt2", vocab_size=300)
    assert "unknown" not in printed
