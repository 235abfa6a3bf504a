"""`show` prints what the corpus holds and colours corruptions."""

import io

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from data_pipelines.__main__ import main
from data_pipelines.corpus import Corpus
from data_pipelines.show import show_examples, show_statistics
from pretrain.recipe import to_json
from pretrain.recipes.registry import find
from tests.data_pipelines.prepared import run


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "aaa b. ccc."}\n{"text": "a"}\n{\n')
    run(tmp_path / "out", f"jsonl:{tmp_path}/a.jsonl")
    return Corpus(tmp_path / "out")


def tokenizer(corpus):
    return Tokenizer.from_file(str(corpus.tokenizer_path / "tokenizer.json"))


def test_statistics(corpus):
    screen = io.StringIO()
    show_statistics(corpus, tokenizer(corpus), Console(file=screen, width=120))
    printed = screen.getvalue()
    assert "│ train   │ 2         │ 2         │ 10     │" in printed
    assert "parts: 1; fields: tokens (token), word_starts (token), sources (document), languages (document)" in printed
    assert "languages: en" in printed
    assert "1.20 characters per token" in printed  # 12 characters in the two sentences
    assert "vocabulary 193, of which 6 occur; 0.000% of the tokens are unknown" in printed
    assert "##a 2" in printed
    assert "1 malformed records; the first:" in printed
    assert "tokens are of bytes" not in printed


def test_tokens_of_bytes_are_explained(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("A b.\nA c.\n")
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer="bpe", vocab_size=270)
    assert main(["show", str(tmp_path / "out")]) == 0
    assert "tokens are of bytes: Ġ is a space" in capsys.readouterr().out


def test_histograms_count_every_document(corpus):
    screen = io.StringIO()
    show_statistics(corpus, tokenizer(corpus), Console(file=screen, width=120))
    rows = [line.split() for line in screen.getvalue().splitlines()]
    assert ["1", "1", "1", "█" * 40] in rows
    assert ["8", "15", "1", "█" * 40] in rows  # nine tokens


def test_examples_show_what_was_done_to_each_predicted_token(corpus):
    found = tokenizer(corpus)
    a, b, c = (found.token_to_id(token) for token in "abc")
    batch = {
        "tokens": np.array([[2, a, 4, b, c, 3, 0, 0]], np.int32),
        "types": np.zeros((1, 8), np.int32),
        "segments": np.array([[1, 1, 1, 1, 1, 1, 0, 0]], np.int32),
        "prediction_positions": np.array([[2, 3, 4, 0]], np.int32),
        "prediction_targets": np.array([[a, a, c, 0]], np.int32),
        "prediction_weights": np.array([[1, 1, 1, 0]], np.float32),
        "next_sentence": np.array([1], np.int32),
    }
    screen = io.StringIO()
    console = Console(file=screen, width=120, force_terminal=True, color_system="standard", highlight=False)
    show_examples(found, 4, batch, console)
    printed = screen.getvalue()
    assert "6 tokens of 8, 3 to predict, B is random" in printed
    assert "\x1b[1;37;41m[MASK]→a" in printed  # white on red
    assert "\x1b[1;30;43mb→a" in printed  # black on yellow
    assert "\x1b[1;30;42mc\x1b" in printed  # black on green
    assert "[PAD]" not in printed


@pytest.mark.parametrize(
    "label, said",
    [
        ("next_sentence", ["B follows A", "B is random", "one segment"]),
        ("sentence_order", ["B follows A", "A follows B", "one segment"]),
    ],
)
def test_examples_say_how_their_segments_follow_each_other(corpus, label, said):
    names = ("prediction_positions", "prediction_targets", "prediction_weights")
    batch = {"tokens": np.full((3, 2), 5), "segments": np.ones((3, 2)), label: np.array([0, 1, -1], np.int32)}
    screen = io.StringIO()
    show_examples(tokenizer(corpus), 4, batch | dict.fromkeys(names, np.zeros((3, 0), int)), Console(file=screen))
    headings = [line for line in screen.getvalue().splitlines() if line.startswith("example")]
    assert [heading.split("predict, ")[1] for heading in headings] == said


def test_permuted_rows_say_which_tokens_are_predicted_in_which_order(corpus):
    found = tokenizer(corpus)
    a, b, c = (found.token_to_id(token) for token in "abc")
    batch = {
        "tokens": np.array([[a, b, c, 3, b, 3, 2]], np.int32),
        "segments": np.ones((1, 7), np.int32),
        "ranks": np.array([[2, 0, 1, 5, 4, 7, 6]], np.int32),
        "prediction_positions": np.array([[0, 2, 4, 0]], np.int32),
        "prediction_targets": np.array([[a, c, b, 0]], np.int32),
        "prediction_weights": np.array([[1, 1, 1, 0]], np.float32),
        "reversed": np.array([1], np.int32),
    }
    screen = io.StringIO()
    show_examples(found, 4, batch, Console(file=screen, width=120))
    assert "7 tokens of 7, 3 to predict, runs backwards" in screen.getvalue()
    assert "in the order 2 c  0 a  4 b" in screen.getvalue()


def test_rows_of_a_stream_are_shown_as_text(corpus):
    found = tokenizer(corpus)
    a, b = (found.token_to_id(token) for token in "ab")
    batch = {
        "tokens": np.array([[a, b, 3, a, 0]], np.int32),
        "targets": np.array([[b, 3, a, b, 0]], np.int32),
        "segments": np.array([[1, 1, 1, 2, 0]], np.int32),
        "weights": np.array([[1, 1, 1, 1, 0]], np.float32),
    }
    screen = io.StringIO()
    show_examples(found, 4, batch, Console(file=screen, width=120))
    assert screen.getvalue().splitlines() == ["", "example 0: 4 tokens of 5, 4 to predict", "a b [SEP] a"]


def test_show_takes_a_recipe(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join("Some words here. And there." for _ in range(40)))
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", documents="blank-line")
    assert main(["show", str(tmp_path / "out"), "--recipe", "bert-tiny", "--examples", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("to predict") == 2
    assert "[MASK]→" in printed
    (tmp_path / "recipe.json").write_text(to_json(find("bert-tiny")))
    assert main(["show", str(tmp_path / "out"), "--recipe", str(tmp_path / "recipe.json"), "--examples", "2"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["show", str(tmp_path / "out"), "--recipe", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "out"), "--recipe", "bert-tinny"]) == 2
    assert "did you mean bert-tiny" in capsys.readouterr().err


def test_show_of_no_corpus_is_an_error(tmp_path, capsys):
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "does not exist; make it with" in capsys.readouterr().err


def test_pieces_are_joined_to_words_and_special_tokens_stand_alone(tmp_path):
    (tmp_path / "a.txt").write_text("a [b a [b ab")
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer="sentencepiece-unigram", vocab_size=13)
    found = tokenizer(Corpus(tmp_path / "out"))
    pieces = ["▁", "a", "[", "▁", "b", "<sep>", "a", "<cls>"]
    tokens = np.array([[found.token_to_id(piece) for piece in pieces]], np.int32)
    names = ("prediction_positions", "prediction_targets", "prediction_weights")
    batch = {"tokens": tokens, "segments": np.ones_like(tokens), **dict.fromkeys(names, np.zeros((1, 0), np.int32))}
    screen = io.StringIO()
    show_examples(found, 6, batch, Console(file=screen, width=120))
    assert screen.getvalue().splitlines()[-1] == "a[ b <sep>a <cls>"
