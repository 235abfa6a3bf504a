"""A vocabulary of whole words: the most frequent first, loaded by Hugging Face with the same ids."""

import pytest
from transformers import AutoTokenizer

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.tokenizers import training
from data_pipelines.tokenizers.made import Made, vocabulary
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training
from tests.data_pipelines.prepared import run, stored

TEXTS = ["the Cat <unk> sat , the cat SAT @-@ café\t的 猫", "the the a\u00a0b 猫 <pad> \u200b é e\u0301"]
SPECIALS = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<eod>"]


def make(**options) -> Made:
    return train("wordlevel", TEXTS, Training(100, **options))


def words(made: Made) -> list[str]:
    return vocabulary(made.tokenizer)[len(SPECIALS) :]


def test_words_come_by_falling_frequency_then_by_spelling_after_the_special_tokens():
    made = make(cased=True)
    assert vocabulary(made.tokenizer)[: len(SPECIALS)] == SPECIALS
    assert made.special == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4, "eod": 5}
    assert words(made) == ["the", "猫", ",", "@-@", "Cat", "SAT", "a", "b", "café", "cat", "e\u0301", "sat", "é", "的"]


def test_case_and_accents_go_unless_kept():
    assert words(make()) == ["the", "cat", "e", "sat", "猫", ",", "@-@", "a", "b", "cafe", "的"]
    assert {"café", "cat", "é"} < {*words(make(keep_accents=True))}
    assert "Cat" not in words(make(keep_accents=True))


def test_prepare_counts_the_whole_text_and_keeps_to_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipelines.prepare.training.SAMPLE", 10)
    (tmp_path / "a.txt").write_text("rare one .\n\n" + "many many two .\n\n" * 50)
    options = {"tokenizer": "wordlevel", "documents": "blank-line", "vocab_size": len(SPECIALS) + 4}
    manifest, _ = run(tmp_path / "one", f"text:{tmp_path}/a.txt", **options)
    corpus = Corpus(tmp_path / "one")
    theirs = AutoTokenizer.from_pretrained(corpus.tokenizer_path)
    assert theirs.convert_ids_to_tokens(range(6, 10)) == ["many", ".", "two", "one"]
    assert theirs.decode(stored(corpus.path)[:6]) == "<unk> one . many many two"
    assert manifest["special"]["eod"] == theirs.convert_tokens_to_ids("<eod>") == 5
    counts = corpus.token_counts()[6:]
    assert counts.tolist() == sorted(counts, reverse=True)


def test_a_size_without_words_is_an_error():
    with pytest.raises(UserError, match="--vocab-size 6: use at least 7"):
        train("wordlevel", TEXTS, Training(6))


def test_memory_is_bounded_by_forgetting_rare_words(monkeypatch):
    monkeypatch.setattr(training, "MOST_WORDS", 20)
    texts = ["often often " + " ".join(f"w{number * 10 + one}" for one in range(10)) for number in range(100)]
    tokens = vocabulary(train("wordlevel", texts, Training(1000)).tokenizer)
    assert tokens[6] == "often"
    assert len(tokens) <= 6 + 20
