"""The command divides text into words, and scores words by where they begin and end."""

import pytest

from data_pipelines.__main__ import main
from data_pipelines.segment import agreement, words_of


@pytest.fixture
def files(tmp_path):
    def write(name, *lines):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
        return str(tmp_path / name)

    write("list", "研究", "研究生", "生命", "起源")
    return write


def run(tmp_path, *given, words="forward"):
    spec = f"{words}:{tmp_path / 'list'}" if words.endswith("ward") else words
    return main(["segment", "--words", spec, *given])


def test_a_score_is_of_the_words_whose_both_ends_agree(files, tmp_path, capsys):
    gold = files("gold", "研究 生命 的 起源 。", "他 说 BERT好")
    out = tmp_path / "out"
    assert run(tmp_path, "--gold", gold, "--out", str(out)) == 0
    assert out.read_text("utf-8") == "研究生 命 的 起源 。\n他 说 BERT 好\n"
    printed = capsys.readouterr().out
    assert "2 lines: 8 words, 9 found, 5 of them right" in printed
    assert "precision 0.5556   recall 0.6250   F1 0.5882" in printed
    assert run(tmp_path, "--gold", gold, words="backward") == 0
    assert "F1 0.8235" in capsys.readouterr().out
    assert run(tmp_path, "--gold", gold, "--text", str(out), words="spaces") == 0
    assert "F1 0.5882" in capsys.readouterr().out


def test_precision_is_of_what_is_found_and_recall_of_what_there_is():
    assert agreement([["ab", "c", "de"]], [["a", "b", "c", "de"]]) == (2, 3, 4)


def test_what_is_not_chinese_is_divided_by_kinds_of_characters():
    assert words_of("我用BERT-2 を3.5次!", lambda run: [*range(len(run))]) == [
        *"我用",
        "BERT",
        *"-2",
        "を3",
        ".",
        "5",
        *"次!",
    ]


@pytest.mark.parametrize(
    ("given", "words", "said"),
    [
        (("--gold", "GOLD", "--text", "OTHER"), "forward", "--gold: line 2 has other characters than that of --text"),
        (("--gold", "GOLD", "--text", "SHORT"), "forward", "--gold: line 2 has other characters"),
        (("--gold", "GOLD"), "spaces", "--words spaces: needs --text"),
        (("--text", "GOLD"), "forward", "--gold and --out are both missing"),
        (("--gold", "list2"), "forward", r"--gold list2: cannot be read (No such file or directory)"),
        (("--gold", "GOLD"), "best", "--words best: there is no such segmenter; use forward:FILE"),
        (("--text", "GOLD", "--out", "FOLDER/x"), "forward", "--out FOLDER/x: cannot be written"),
    ],
)
def test_a_mistake_is_one_line(files, tmp_path, capsys, given, words, said):
    places = {
        "GOLD": files("gold", "研究 生命", "的"),
        "OTHER": files("other", "研究生命", "地"),
        "SHORT": files("short", "研究生命"),
    }
    assert run(tmp_path, *(places.get(name, name) for name in given), words=words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
