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


def tokenizer_of(corpus):
    return Tokenizer.from_file(str(corpus.tokenizer_path / "tokenizer.json"))


def shown(corpus, mask=4, colours=None, **batch):
    """What is printed of a batch of rows, which are given as spelled; predictions: {place: what was there}."""
    tokenizer, screen = tokenizer_of(corpus), io.StringIO()
    ids = lambda rows: np.array([[tokenizer.token_to_id(token) for token in row] for row in rows], np.int32)
    batch |= {name: ids(batch[name]) for name in ("tokens", "targets") if name in batch}
    predictions = batch.pop("predictions", {})
    if "targets" not in batch:
        batch["prediction_positions"] = np.array([[*predictions, 0]] * len(batch["tokens"]))
        batch["prediction_targets"] = ids([[*predictions.values(), "[PAD]"]] * len(batch["tokens"]))
        batch["prediction_weights"] = np.array([[1] * len(predictions) + [0]] * len(batch["tokens"]))
    batch = {"segments": np.ones_like(batch["tokens"])} | {name: np.array(array) for name, array in batch.items()}
    console = Console(file=screen, width=120, force_terminal=bool(colours), color_system=colours, highlight=False)
    show_examples(tokenizer, mask, batch, console)
    return screen.getvalue()


def test_statistics_and_histograms(corpus):
    screen = io.StringIO()
    show_statistics(corpus, tokenizer_of(corpus), Console(file=screen, width=120))
    printed = screen.getvalue()
    assert "│ train   │ 2         │ 2         │ 10     │" in printed
    assert "parts: 1; fields: tokens (token), word_starts (token), sources (document), languages (document)" in printed
    assert "1.20 characters per token" in printed  # 12 characters in the two sentences
    assert "vocabulary 193, of which 6 occur; 0.000% of the tokens are unknown" in printed
    assert "##a 2" in printed
    assert "1 malformed records; the first:" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["1", "1", "1", "█" * 40] in rows
    assert ["8", "15", "1", "█" * 40] in rows  # nine tokens


def test_examples_show_what_was_done_to_each_predicted_token(corpus):
    row = ["[CLS]", "a", "[MASK]", "b", "c", "[SEP]", "[PAD]", "[PAD]"]
    segments = [[1, 1, 1, 1, 1, 1, 0, 0]]
    predictions = {2: "a", 3: "a", 4: "c"}
    rows = {"tokens": [row], "segments": segments, "predictions": predictions, "next_sentence": [1]}
    printed = shown(corpus, colours="standard", **rows)
    assert "6 tokens of 8, 3 to predict, B is random" in printed
    assert "\x1b[1;37;41m[MASK]→a" in printed  # white on red
    assert "\x1b[1;30;43mb→a" in printed  # black on yellow
    assert "\x1b[1;30;42mc\x1b" in printed  # black on green
    assert "[PAD]" not in printed


@pytest.mark.parametrize(("label", "one"), [("next_sentence", "B is random"), ("sentence_order", "A follows B")])
def test_examples_say_how_their_segments_follow_each_other(corpus, label, one):
    printed = shown(corpus, tokens=[["a", "a"]] * 3, **{label: [0, 1, -1]})
    headings = [line.split("predict, ")[1] for line in printed.splitlines() if line.startswith("example")]
    assert headings == ["B follows A", one, "one segment"]


def test_permuted_rows_say_which_tokens_are_predicted_in_which_order(corpus):
    row = ["a", "b", "c", "[SEP]", "b", "[SEP]", "[CLS]"]
    ranks, predictions = [[2, 0, 1, 5, 4, 7, 6]], {0: "a", 2: "c", 4: "b"}
    printed = shown(corpus, tokens=[row], ranks=ranks, predictions=predictions, reversed=[1])
    assert "7 tokens of 7, 3 to predict, runs backwards" in printed
    assert "in the order 2 c  0 a  4 b" in printed
    assert "in the order" not in shown(corpus, tokens=[row], ranks=ranks, predictions=predictions)  # UniLM's


def test_rows_of_a_stream_are_shown_as_text(corpus):
    rows = {"tokens": [["a", "b", "[SEP]", "a", "[PAD]"]], "targets": [["b", "[SEP]", "a", "b", "[PAD]"]]}
    printed = shown(corpus, **rows, segments=[[1, 1, 1, 2, 0]], weights=[[1, 1, 1, 1, 0]])
    assert printed.splitlines() == ["", "example 0: 4 tokens of 5, 4 to predict", "a b [SEP] a"]


def test_an_input_is_shown_with_its_target(corpus):
    rows = {"tokens": [["a", "[MASK]", "[SEP]", "[PAD]"]], "targets": [["a", "b", "a", "[SEP]"]]}
    printed = shown(corpus, **rows, segments=[[1, 1, 1, 0]], decoder_segments=[[1, 1, 1, 1]], weights=[[1, 1, 1, 1]])
    assert printed.splitlines()[1:] == [
        "example 0: 3 tokens of 4, 4 to predict",
        "a [MASK] [SEP]",
        "target a b a [SEP]",
    ]


def test_show_takes_a_recipe_and_refuses_what_is_not_there(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join("Some words here. And there." for _ in range(40)))
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", documents="blank-line")
    show = lambda recipe: main(["show", str(tmp_path / "out"), "--recipe", recipe, "--examples", "2"])
    assert show("bert-tiny") == 0
    printed = capsys.readouterr().out
    assert printed.count("to predict") == 2
    assert "[MASK]→" in printed
    (tmp_path / "recipe.json").write_text(to_json(find("bert-tiny")))
    assert show(str(tmp_path / "recipe.json")) == 0
    assert capsys.readouterr().out == printed
    assert main(["show", f"one={tmp_path}/out,other={tmp_path}/out", "--recipe", "bert-tiny"]) == 0
    assert capsys.readouterr().out.count("to predict") == 3
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "does not exist; make it with" in capsys.readouterr().err


def test_pieces_are_joined_to_words_and_special_tokens_stand_alone(tmp_path):
    (tmp_path / "a.txt").write_text("a [b a [b ab")
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer="sentencepiece-unigram", vocab_size=13)
    pieces = ["▁", "a", "[", "▁", "b", "<sep>", "a", "<cls>"]
    rows = {"tokens": [pieces], "targets": [pieces], "weights": np.zeros((1, 8))}
    assert shown(Corpus(tmp_path / "out"), mask=6, **rows).splitlines()[-1] == "a[ b <sep>a <cls>"
