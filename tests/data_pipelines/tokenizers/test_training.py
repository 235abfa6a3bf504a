"""What tokenizers are trained on is bounded, whatever the text, and adds up; a vocabulary is filled."""

import random

import pytest

from data_pipelines.tokenizers import training
from data_pipelines.tokenizers.made import vocabulary
from data_pipelines.tokenizers.table import KINDS, learn, train
from data_pipelines.tokenizers.training import LONGEST, Training, bounded

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


def test_frequent_characters_come_before_rare_words():
    characters = "".join(chr(0x4E00 + number) for number in range(900))
    words = " ".join(f"{number}word{number}" for number in range(2000))
    tokens = vocabulary(train("wordpiece", [characters * 20 + words], Training(1500)).tokenizer)
    assert {*characters} <= {*tokens}
    assert len(tokens) == 1500


def test_rare_characters_leave_room_for_words():
    words = " ".join(f"common{number:04}" for number in range(3000))
    texts = [words] * 10 + ["".join(map(chr, range(0x4E00, 0x4E00 + 5000)))]
    tokens = vocabulary(train("wordpiece", texts, Training(2000)).tokenizer)
    assert "common" in tokens
    assert sum(0x4E00 <= ord(token[-1]) < 0x7000 for token in tokens) <= 500
