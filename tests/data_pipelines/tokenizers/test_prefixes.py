"""A control code is one token in a corpus's vocabulary, for a text that follows it, and for Hugging Face."""

import pytest
from transformers import AutoTokenizer

from data_pipelines.__main__ import main
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.tokenizers import prefixes, stored
from tests.data_pipelines.prepared import command

TEXT = "the horror of the links and the laws of the land\n" * 20


def prepared(folder, name, *more, sources=1):
    told = ["--vocab-size", "300", "--heldout", "0"]
    for number in range(sources):
        (folder / f"{number}.txt").write_text(TEXT + str(number))
        told += ["--source", f"text:{folder}/{number}.txt"]
    return command(folder / name, *told, *more)


@pytest.mark.parametrize("kind", [("bpe", "gpt2"), ("character-bpe", "ctrl")])
def test_a_code_of_each_source_is_a_token_that_nothing_cuts(tmp_path, capsys, kind):
    more = ["--code", "Horror", "--code", "r/Science", "--tokenizer", kind[0], "--specials", kind[1]]
    assert prepared(tmp_path, "c", *more, sources=2) == 0
    corpus = Corpus(tmp_path / "c")
    codes = [corpus.special["code_Horror"], corpus.special["code_r/Science"]]
    assert codes == [corpus.vocab_size - 2, corpus.vocab_size - 1]
    (part,) = corpus.parts
    numbers = part.column("train", "code")
    assert numbers.tolist() == part.column("train", "sources").tolist() == [0, 1]
    assert not set(codes) & set(part.array("train", "tokens").tolist())
    theirs = AutoTokenizer.from_pretrained(corpus.tokenizer_path)
    assert len(theirs) == corpus.vocab_size and theirs.convert_tokens_to_ids(["Horror", "r/Science"]) == codes
    for text, code in (("Horror the land", codes[0]), ("r/Science the land", codes[1])):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids[0] == code and codes[0] not in ids[1:] and len(ids) > 2
    assert main(["show", str(tmp_path / "c")]) == 0
    assert "code: Horror, r/Science" in capsys.readouterr().out


def test_a_tokenizer_that_is_there_must_have_the_code(tmp_path, capsys):
    assert prepared(tmp_path, "c", "--tokenizer", "wordlevel") == 0
    given = ["--tokenizer", str(tmp_path / "c" / "tokenizer")]
    assert prepared(tmp_path, "d", *given, "--code", "links") == 0
    assert Corpus(tmp_path / "d").special["code_links"] < Corpus(tmp_path / "d").vocab_size
    capsys.readouterr()
    assert prepared(tmp_path, "e", *given, "--code", "linkz") == 2
    assert "--code linkz: is not a token of the tokenizer; the nearest is 'links'" in capsys.readouterr().err


def test_a_run_s_tokenizer_tells_the_token_of_a_code_and_names_the_nearest(tmp_path):
    assert prepared(tmp_path, "c", "--tokenizer", "bpe", "--specials", "gpt2", "--code", "Horror") == 0
    corpus = Corpus(tmp_path / "c")
    made = stored.load(corpus.tokenizer_path)
    assert prefixes.token(made, "Horror") == corpus.special["code_Horror"] == corpus.vocab_size - 1
    for other in ("horror", "the", "<|endoftext|>"):  # the last is special, and no code
        with pytest.raises(UserError, match="is not a code of the run's tokenizer; the nearest one is 'Horror'"):
            prefixes.token(made, other)


@pytest.mark.parametrize("tokenizer", ["wordlevel", "wordpiece", "bpe"])
def test_a_code_takes_no_token_from_texts(tmp_path, capsys, tokenizer):
    assert prepared(tmp_path, "c", "--tokenizer", tokenizer, "--code", "the") == 2
    said = "--code the: the trained tokenizer has that token for texts; rename it, as [the]"
    assert said in capsys.readouterr().err
    assert prepared(tmp_path, "c", "--tokenizer", tokenizer, "--code", "[the]") == 0
    corpus = Corpus(tmp_path / "c")
    assert corpus.special["code_[the]"] == corpus.vocab_size - 1
    assert corpus.special["unk"] not in corpus.parts[0].array("train", "tokens")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--code", " "], "--code ' ': is blank or has control characters"),
        (["--code", "a\nb"], "--code 'a\\nb': is blank or has control characters"),
        (["--code", "A", "--code", "B"], "--code A --code B: 2 for 1 sources; give one, or one for each"),
        (["--code-field", "domain"], "--code-field domain: needs --code; give --code for each code that occurs"),
        (["--code-field", "domain", "--code", "A"], "has no fields; leave it out"),
    ],
)
def test_codes_that_cannot_be_are_errors_before_anything_is_read(tmp_path, capsys, more, said):
    assert prepared(tmp_path, "c", "--tokenizer", "bpe", "--specials", "gpt2", *more) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "training" not in printed.out


def test_what_is_added_to_a_corpus_has_one_of_its_codes(tmp_path, capsys):
    assert prepared(tmp_path, "c", "--tokenizer", "bpe", "--code", "Horror") == 0
    (tmp_path / "more.txt").write_text("the land of links")
    add = lambda *more: command(tmp_path / "c", "--append", "--source", f"text:{tmp_path}/more.txt", *more)
    assert add("--code", "Horor") == 2
    assert "--code Horor: is not a code of the corpus" in capsys.readouterr().err
    assert add() == 2
    assert "the corpus has control codes; give --code too, as in --code Horror" in capsys.readouterr().err
    assert add("--code", "Horror") == add("--code", "Horror") == 0  # the second time there is nothing to do


def test_what_is_in_a_corpus_gets_no_other_code(tmp_path, capsys):
    codes = ["--code", "[A]", "--code", "[B]"]
    assert prepared(tmp_path, "c", "--tokenizer", "bpe", *codes, sources=2) == 0
    add = lambda *more: command(tmp_path / "c", "--append", *more)
    for more, said in ((codes[2:], "--code [B]"), ([], "no --code")):
        assert add("--source", f"text:{tmp_path}/0.txt", *more) == 2
        line = f"0.txt is already in the corpus, with --code [A] and not with {said}; leave it out"
        assert line in capsys.readouterr().err


def test_one_code_is_that_of_all_sources(tmp_path):
    assert prepared(tmp_path, "c", "--tokenizer", "bpe", "--code", "[A]", sources=2) == 0
    (part,) = Corpus(tmp_path / "c").parts
    assert part.column("train", "code").tolist() == [0, 0]
