"""What tokenizers are trained on is bounded and adds up, a vocabulary is filled, and frequent words are in it."""

import random

import pytest
from transformers import AutoTokenizer

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.tokenizers import training
from data_pipelines.tokenizers.made import Made, vocabulary
from data_pipelines.tokenizers.table import KINDS, learn
from data_pipelines.tokenizers.training import LONGEST, Training, bounded
from tests.data_pipelines.prepared import run, stored
from tests.data_pipelines.tokenizers.trained import train

LINE = "".join(random.Random(1).choices("abcdefghij", k=100_000))  # without white space
TRAINED = [kind for kind in KINDS if kind != "bytes"]


@pytest.mark.parametrize("kind", TRAINED)
def test_a_long_line_without_spaces_is_cut_and_only_so_much_of_it_is_learnt_of(kind, monkeypatch):
    words = KINDS[kind].count([LINE], Training(100))
    assert max(map(len, words)) <= LONGEST
    assert sum(map(len, words)) <= len(LINE)
    monkeypatch.setattr(training, "MOST_CHARACTERS", 10 * LONGEST)
    assert 0 < sum(len(word) for word, _ in bounded(words)) <= 10 * LONGEST
    assert learn(kind, words, Training(400 if kind == "bpe" else 70)).tokenizer.get_vocab_size() > 10


@pytest.mark.parametrize("kind", TRAINED)
def test_counts_of_parts_add_up(kind):
    texts = ["one two. Two", "two\n three", "Café, one"]
    parts = [KINDS[kind].count([text], Training(100)) for text in texts]
    assert sum(parts, start=type(parts[0])()) == KINDS[kind].count(texts, Training(100))


def test_a_wordpiece_of_words_of_one_character_keeps_the_alphabet():
    """Chinese, whose words are characters, so that nothing can be merged."""
    frequent = "".join(chr(0x4E00 + number) for number in range(1200))
    rare = "".join(chr(0x4E00 + 1200 + number) for number in range(300))
    tokens = vocabulary(train("wordpiece", [frequent * 20 + rare], Training(2000)).tokenizer)
    assert {*frequent, *rare} <= {*tokens}


def test_rare_characters_leave_room_for_words():
    words = " ".join(f"common{number:04}" for number in range(3000))
    texts = [words] * 10 + ["".join(map(chr, range(0x4E00, 0x4E00 + 5000)))]
    tokens = vocabulary(train("wordpiece", texts, Training(2000)).tokenizer)
    assert "common" in tokens
    assert sum(0x4E00 <= ord(token[-1]) < 0x7000 for token in tokens) <= 500


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


@pytest.mark.parametrize(("kind", "size", "least"), [("wordlevel", 6, 7), ("wordpiece", 20, 64)])
def test_a_size_without_room_for_words_is_an_error(kind, size, least):
    with pytest.raises(UserError, match=f"--vocab-size {size}: use at least {least}"):
        train(kind, TEXTS, Training(size))


def test_memory_is_bounded_by_forgetting_rare_words(monkeypatch):
    monkeypatch.setattr(training, "MOST_WORDS", 20)
    texts = ["often often " + " ".join(f"w{number * 10 + one}" for one in range(10)) for number in range(100)]
    tokens = vocabulary(train("wordlevel", texts, Training(1000)).tokenizer)
    assert tokens[6] == "often"
    assert len(tokens) <= 6 + 20


def test_the_rarest_word_is_given_to_the_trainer_once_however_few_are():
    assert list(training._repeated([("often", 2000), ("rare", 1)], 0.001)) == ["often often", "rare"]
