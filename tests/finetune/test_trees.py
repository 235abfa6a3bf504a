"""Which heads know which relations of trees, beside loops over words; files of trees."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit

from data_pipelines.tokenizers.made import Made, surround
from finetune import trees
from finetune.__main__ import main

VOCABULARY = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "##b": 4, "c": 5}
PIECES = {"a": 1, "ab": 2, "c": 1, "abb": 3}
SHORT = [  # words, each with its head, counted from 1, and the relation to it
    [("ab", 2, "x"), ("c", 0, "root"), ("abb", 1, "y"), ("a", 2, "x")],
    [("c", 3, "x"), ("abb", 1, "x"), ("ab", 0, "root"), ("a", 3, "y"), ("c", 1, "x")],
    [("a", 0, "root"), ("ab", 1, "y"), ("c", 1, "rare"), ("c", 2, "x")],
]
LONG = [("abb", 0, "root"), ("abb", 1, "x"), ("abb", 2, "x"), ("a", 1, "y"), ("c", 4, "x")]  # "a" is in another row


@pytest.fixture
def model(monkeypatch):
    """Whose attention is a function of the number of tokens in a row."""
    tokenizer = Tokenizer(WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    surround(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]")
    opened = SimpleNamespace(tokenizer=Made(tokenizer, VOCABULARY, {}), config=SimpleNamespace(positions=11))

    def looked(of, rows, look, tokens):
        for number, length in enumerate(rows.lengths.tolist()):
            yield np.array([number]), np.pad(attention(length), ((0, 0), (0, 0), (0, 0), (0, 2), (0, 2)))

    monkeypatch.setattr(trees, "looked", looked)
    monkeypatch.setattr("finetune.commands.attention.open_model", lambda *_: opened)
    return opened


def attention(length):
    """[2 layers, 1 row, 3 heads, queries, keys]."""
    return np.random.default_rng(length).dirichlet(np.full(length, 0.3), (2, 1, 3, length)).astype(np.float32)


def write(path, sentences):
    lines = [
        "\n".join(f"{n}\t{w}\t_\tX\t_\t_\t{h}\t{r}\t_\t_" for n, (w, h, r) in enumerate(of, 1)) for of in sentences
    ]
    path.write_text("\n\n".join(lines) + "\n", "utf-8")
    return path


def right(looks, layer, head, sentence, word):
    """Whether that head finds the head of a word, by loops."""
    ends = list(itertools.accumulate((PIECES[text] for text, _, _ in sentence), initial=1))
    shares, scores = attention(ends[-1] + 1)[layer, 0, head], {}
    for other in range(len(sentence)):
        of, at = (word, other) if looks == "dependent" else (other, word)
        pieces = [shares[query, ends[at] : ends[at + 1]].sum() for query in range(ends[of], ends[of + 1])]
        scores[other] = np.mean(pieces) if other != word else -1
    return max(scores, key=scores.get) == sentence[word][1] - 1


def test_a_line_of_a_relation_has_the_best_of_all_heads_and_offsets(model, tmp_path, capsys):
    out = tmp_path / "out.tsv"
    file, given = write(tmp_path / "trees.conllu", [*SHORT, LONG]), ("--cases", "3", "--length", "30")
    assert main(["attention", "run", "--trees", str(file), "--out", str(out), *given]) == 0
    assert "left out: 1 words of relations with fewer than --cases 3" in (printed := capsys.readouterr().out)
    assert "left out: 1 words not in the same row as their heads" in printed
    names, *lines = (line.split("\t") for line in out.read_text().splitlines())
    found = [dict(zip(names, line, strict=True)) for line in lines]
    cut = [LONG[:3], [("a", 0, ""), ("c", 1, "x")]]
    words = [(of, at) for of in (*SHORT, *cut) for at in range(len(of)) if of[at][1]]
    hits = np.concatenate(trees.hits(model, trees.rows_of_trees(model, trees.trees(file), 11)), axis=-1)
    for (looks, layer, head, word), hit in np.ndenumerate(hits):
        assert hit == right(trees.DIRECTIONS[looks], layer, head, *words[word])
    assert [line["relation"] for line in found] == ["all", "x", "y"]
    for line in found:
        asked = [one for one in words if line["relation"] in ("all", one[0][one[1]][2])]
        share = lambda *head, asked=asked: np.mean([right(*head, *one) for one in asked])
        every = [share(*head) for head in itertools.product(("dependent", "head"), range(2), range(3))]
        said = line["looks"], int(line["layer"]) - 1, int(line["head"]) - 1
        assert float(line["accuracy"]) == pytest.approx(share(*said)) == pytest.approx(max(every))
        offsets = [of[at][1] - 1 - at for of, at in asked]
        assert int(line["words"]) == len(asked)
        assert float(line["accuracy of offset"]) == pytest.approx(
            max(offsets.count(offset) for offset in offsets) / len(asked)
        )
        assert offsets.count(int(line["offset"])) / len(asked) == pytest.approx(float(line["accuracy of offset"]))


@pytest.mark.parametrize(
    ("sentences", "given", "message"),
    [
        ([[("a", 3, "x"), ("c", 0, "root")]], [], "line 1: head '3' is not a word of the sentence"),
        ([[("a", 0, "root")]], [], "--trees: no word is in the same row as its head"),
        (SHORT, ["--cases", "90"], "--cases 90: "),
    ],
)
def test_trees_without_an_answer_are_an_error(sentences, given, message, model, tmp_path, capsys):
    file = write(tmp_path / "trees.conllu", sentences)
    assert main(["attention", "run", "--trees", str(file), "--out", str(tmp_path / "out.tsv"), *given]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out.tsv").exists()
