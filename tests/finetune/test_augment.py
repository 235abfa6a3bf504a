"""Copies of rows with other words: rates, what stays, where words come from, and what is refused."""

import json
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines import noise
from data_pipelines.similar_words import Alike
from data_pipelines.tokenizers import stored
from finetune.__main__ import main
from finetune.commands import augment
from finetune.commands.augment import copies, of_vectors
from finetune.files import records
from finetune.inside import looked
from pretrain.generation.decoding import log_probabilities

VOCABULARY, ALLOWED = 195, 60  # the words that the model below predicts are among the tokens from here on
PAIRS = [("mu po, Kilo-te!", "Ünïted  qqxz 🙂"), ("", "te [MASK] risu"), ("nade " * 40, "qqxz")]
VECTORS = "5 2\nqqxz 1 0\nünïted 0 1\nzebra 1 0.1\nyak 1 -0.1\nox -1 0\n"


def scored(model, params, inputs, slots):
    """A model that predicts next to a mask what its place says, elsewhere only the first tokens."""
    masked = jnp.take_along_axis(inputs["tokens"], slots, axis=1) == MASK
    near = -((jnp.arange(256) - ALLOWED - slots) % 256)
    return jnp.where(masked & (jnp.arange(256) < VOCABULARY), near, -1000 - jnp.arange(256)).astype(jnp.float32)


@pytest.fixture
def file(begun, tmp_path, monkeypatch):
    global MASK
    MASK = stored.load(begun / "from" / "tokenizer").special["mask"]
    monkeypatch.setattr(augment, "log_probabilities", scored)
    file = tmp_path / "train.tsv"
    rows = [("id", "first", "label", "second"), *((f"{i} ", a, "yes", b) for i, (a, b) in enumerate(PAIRS))]
    file.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "vectors.txt").write_text(VECTORS, "utf-8")
    return file


def run(begun, file, out, *more, text=("first", "second")):
    status = main(
        [*map(str, ("augment", file, "--model", begun / "from", "--out", file.with_name(out), "--text", *text, *more))]
    )
    return status, file.with_name(out)


def test_words_are_replaced_at_the_rate_each_by_all_its_candidates_alike():
    choices = [((2 * n, 2 * n + 1, 1), [f"{n}{letter}" for letter in "abcde"]) for n in range(6)]
    text = "".join(f"{n}." for n in range(6))
    made = [
        copy.split(".")[:-1] for key in range(40) for copy in copies(text, choices, noise.key("test", key), 0.4, 100)
    ]
    counts = np.array(
        [[sum(row[n] == name for row in made) for name in (str(n), *names)] for n, (_, names) in enumerate(choices)]
    )
    assert (counts.sum(1) == len(made)).all()
    expected = len(made) * np.array([0.6, *[0.08] * 5])
    assert ((counts - expected) ** 2 / expected).sum() < 67  # 30 degrees of freedom, p = 0.0001
    both = np.array([[row[0] != "0", row[1] != "1"] for row in made])
    assert abs(both.all(1).mean() - 0.16) < 0.025  # each word for itself


def test_only_words_change_and_only_of_one_text_at_a_time(begun, file, monkeypatch):
    status, out = run(begun, file, "out.jsonl", "--vectors", file.with_name("vectors.txt"), "--candidates", 2)
    assert status == 0
    found, before = ([row.fields for row in records(one, {})] for one in (out, file))
    assert len(found) == len(before) * 41
    for number, row in enumerate(before):
        original, *others = found[41 * number : 41 * (number + 1)]
        assert original == row
        for copy, of in enumerate(others):
            kept = "second" if copy < 20 else "first"
            assert list(of) == list(row) and all(of[name] == row[name] for name in ("id", "label", kept))
    firsts, seconds = ([row[name] for row in found[1:41]] for name in ("first", "second"))
    assert all(one.count(",") == one.count("-") == one.count("!") == 1 for one in firsts)
    assert len({*firsts}) > 10
    # Words of several pieces and unknown ones become the nearest of the vectors
    assert {one.split(" ")[0] for one in seconds} == {"Ünïted", "zebra", "ox"}
    assert {one.split(" ")[2] for one in seconds} == {"qqxz", "zebra", "yak"}
    assert all(one.split(" ")[1] == "" and one.endswith(" 🙂") for one in seconds)
    assert {row["first"] for row in found[41:82]} == {""}
    assert {row["second"].split()[1] for row in found[41:62]} == {"[MASK]"}  # whose letters are several pieces
    longest = [row["first"].split() for row in found[82:]]
    assert all(words[32:] == ["nade"] * 8 for words in longest)  # behind the model's 32 positions


def test_words_of_one_piece_become_what_is_most_probable_at_their_place(begun, file):
    status, out = run(begun, file, "out.jsonl", "--rate", 1, "--copies", 200, text=("second",))
    made = stored.load(begun / "from" / "tokenizer")
    assert status == 0
    place = made.tokenizer.encode(PAIRS[1][1]).tokens.index("te")
    names = [made.tokenizer.id_to_token((ALLOWED + place + number) % 256) or "" for number in range(256)]
    words = [name for name in names if name[:1].isalnum()]
    found = {row.fields["second"].split()[0] for row in records(out, {})[202 : 202 + 200]}
    assert found == {*words[:15]}


def test_the_same_seed_makes_the_same_file_whatever_the_batches(begun, file, monkeypatch):
    made = {}
    for name, tokens, seed, at_once in (("a", 1 << 12, 0, 1000), ("b", 24, 0, 2), ("c", 1 << 12, 1, 1000)):
        monkeypatch.setattr(augment, "RECORDS", at_once)
        monkeypatch.setattr(augment, "looked", partial(looked, tokens=tokens))
        _, out = run(begun, file, f"{name}.jsonl", "--seed", seed)
        made[name] = out.read_bytes()
    assert made["a"] == made["b"] != made["c"]


def test_rows_of_json_keep_what_they_have(begun, file, monkeypatch):
    monkeypatch.setattr(augment, "log_probabilities", log_probabilities)
    row = {"text": 'mu, "po"\n', "label": 1, "more": [0.1, None, "é"]}
    other = file.with_name("train.jsonl")
    other.write_text(json.dumps(row) + "\n")
    status, out = run(begun, other, "out.jsonl", "--copies", 3, text=("text",))
    found = [record.fields for record in records(out, {})]
    assert status == 0 and found[0] == row and len(found) == 4 and "é" in out.read_text("utf-8")
    assert all(of | {"text": ""} == row | {"text": ""} and of["text"].endswith('"\n') for of in found)


def test_of_vectors_those_of_the_word_itself_or_in_small_letters_are_taken(caplog):
    alike = Alike(["ox", "Ox", "cow", "cat"], [], np.array([[1, 0], [0, 1], [1, 0.1], [0.1, 1]], np.float32))
    assert of_vectors(alike, ["Ox", "OX", "emu"], 1) == {"Ox": ["cat"], "OX": ["cow"]}
    assert "--vectors lacks 1 of 3 words, such as emu: they stay" in caplog.text


def test_what_cannot_be_copied_is_said_in_one_line(begun, file, tmp_path, capsys, monkeypatch):
    def said(*more, out="out.jsonl", file=file, text=("first",)):
        assert run(begun, file, out, *more, text=text)[0] == 2
        assert [*tmp_path.glob("out*")] == []
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "line 2: has no third, but has id, first, label, second; name columns with --text" in said(text=("third",))
    (tmp_path / "old.jsonl").touch()
    for out in ("old.jsonl", "out.tsv"):
        assert f"{out}: must be a new file that ends in .jsonl; give another name" in said(out=out)
    assert "--rate 2.0: must be in [0, 1]" in said("--rate", 2)
    lists, cut = tmp_path / "lists.txt", tmp_path / "cut.txt"
    lists.write_text("cow ox\n")
    cut.write_text("2 2\ncow 1\n")
    assert f"--vectors {cut}: word 1 has no vector of 2 numbers; is the file whole?" in said("--vectors", cut)
    assert f"--vectors {lists}: has lists of words; give vectors" in said("--vectors", lists)
    assert "--vectors nowhere: cannot be read" in said("--vectors", "nowhere")
    empty = tmp_path / "empty.tsv"
    empty.write_text("first\tlabel\n...\tyes\n")
    assert "empty.tsv: has no words in first; name columns with --text" in said(file=empty)
    monkeypatch.setattr(augment, "fills", lambda module: False)
    assert "from: does not predict masked words; give a BERT or the like" in said()
