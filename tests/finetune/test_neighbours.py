"""The words of a file that are nearest to a word in its context."""

import json

import numpy as np
import pytest

from finetune.__main__ import main
from finetune.commands import neighbours
from finetune.commands.neighbours import Neighbours, _texts, place_of, spans, vectors

TEXTS = ["Kilo te po, mu nade.", "risu mu", "te Kilo mu po", "voza"]


@pytest.fixture
def asked(begun, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    return ["neighbours", str(begun / "from"), "--texts", str(file), "--text", "body", "--word", "mu", "--number", "3"]


def test_the_word_in_the_same_context_is_nearest_and_marked(asked, capsys):
    assert main([*asked, "--context", "te Kilo mu po"]) == 0
    lines = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cosines = [float(line[0]) for line in lines]
    assert len(lines) == 3 and cosines == sorted(cosines, reverse=True)
    assert [cell.strip() for cell in lines[0]] == ["1.0000", "3", "te Kilo **mu** po"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--context", "te Kilo po"], "--word mu: does not occur in --context 'te Kilo po'; give a context with it"),
        (["--layer", "2"], "--layer 2: "),
        (["--context", "te " * 20 + "mu", "--length", "8"], "is not in the first --length 8 tokens"),
    ],
)
def test_what_cannot_be_looked_for_is_an_error(asked, given, message, capsys):
    assert main([*asked, *given]) == 2
    assert message in capsys.readouterr().err


def test_words_are_between_spaces_and_punctuation_and_chinese_characters_alone():
    assert [place_of("Bank", "The bank, a bank"), place_of("New York", "to new york?")] == [(4, 8), (3, 11)]
    assert [place_of("银行", "去银行取钱"), spans("去银行", 2)] == [(1, 3), [(0, 2), (1, 3)]]
    assert spans("one", 2) == []


def test_a_vector_is_the_mean_over_the_pieces_of_a_word():
    states = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    offsets = np.array([[0, 0], [0, 2], [2, 4], [4, 7], [0, 0]])  # " cd" begins with its space
    found, there = vectors(states, offsets, [(0, 4), (5, 7), (8, 9)])
    expected = np.stack([states[1:3].mean(0), states[3]])
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5)
    assert there == [(0, 4), (5, 7)]


def test_a_layer_is_that_which_is_named_by_default_the_last(monkeypatch):
    monkeypatch.setattr(neighbours, "layer_states", lambda *_: np.arange(3.0))
    assert [neighbours.look_at(layer, "run")(None, None, None) for layer in (0, 1, None)] == [[0], [1], [2]]


def test_a_file_of_lines_has_a_text_a_line(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("one\n\ntwo\n")
    assert _texts(Neighbours(run="", word="one", texts=file)) == {f"{file}, line 1": "one", f"{file}, line 3": "two"}
