"""A stored corpus, one or several, opens, reads what was written, and says in one line what is wrong with it."""

import contextlib
import io
import json
import shutil

import numpy as np
import pytest
from rich.console import Console

from data_pipelines.__main__ import main
from data_pipelines.corpus import Corpus, check_alike, named, open_corpora, written
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from data_pipelines.store.fields import BY_TOKEN, Field
from tests.data_pipelines.corpora import SPECIAL, numbered, random_documents, write_corpus

SHAPE = [[3, 4], [5], [2, 2, 2]]
VOCABULARY = "tokenizer/vocab.txt"


@pytest.fixture
def folder(tmp_path):
    return write_corpus(tmp_path / "corpus", numbered(SHAPE), heldout=numbered([[4]]))


def test_a_corpus_gives_back_its_documents_sentences_and_tokens(folder):
    corpus = Corpus(folder)
    assert corpus.parts[0].lengths("train").tolist() == [7, 5, 6]
    assert corpus.parts[0].documents("train").tolist() == [0, 2, 3, 6]
    assert corpus.parts[0].sentences("train").tolist() == [0, 3, 7, 12, 14, 16, 18]
    assert corpus.parts[0].lengths("heldout").tolist() == [4]
    assert corpus.vocab_size == 100 and corpus.special["mask"] == 4
    assert corpus.fields["word_starts"] == Field("bool", per="token", kept=BY_TOKEN)
    counts = corpus.token_counts()
    assert counts.sum() == 18 and counts[5] == 1 and counts[4] == 0
    corpus.verify()


@pytest.mark.parametrize("length", [1, 6, 18, 40])
def test_read_fills_in_the_stretch_and_ignores_what_lies_outside(folder, length):
    starts = np.arange(-length + 1, 18)
    rows = Corpus(folder).parts[0].read("train", "tokens", starts, length)
    assert rows.shape == (len(starts), length)
    for row, start in zip(rows, starts, strict=True):
        for column, offset in enumerate(range(start, start + length)):
            assert not 0 <= offset < 18 or row[column] == 5 + offset


def change_manifest(folder, **changes):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_no_corpus_of_this_format_is_named_as_what_it_is(folder, tmp_path):
    change_manifest(folder, version=3)
    with pytest.raises(UserError, match="format version 3, this program reads 2"):
        Corpus(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        Corpus(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        Corpus(folder)
    (folder / ".partial").mkdir()
    with pytest.raises(UserError, match="unfinished; rerun"):
        Corpus(folder)
    with pytest.raises(UserError, match="does not exist; make it with"):
        Corpus(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"vocab_size": None}, " is not as prepare wrote it"),
        ({"vocab_size": 10**30}, " is not as prepare wrote it"),
        ({"special": {"pad": 10**9}}, " is not as prepare wrote it"),
        ({"parts": []}, " is not as prepare wrote it"),
        ({"tokenizer": {"../up": {"bytes": 1, "sha256": "0" * 64}}}, ": '../up' is not a valid file name in a corpus"),
        ({"tokenizer": {VOCABULARY: {"bytes": "1", "sha256": "0" * 64}}}, f": {VOCABULARY} has no size or no hash"),
        ({"tokenizer": {VOCABULARY: {"bytes": 1, "sha256": "short"}}}, f": {VOCABULARY} has no size or no hash"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_an_error(folder, change, said):
    change_manifest(folder, **change)
    with pytest.raises(UserError, match=f"manifest.json{said}"):
        Corpus(folder)


@pytest.mark.parametrize("name", ["parts/000000/train/tokens.npy", "tables/word_starts.npy"])
def test_a_file_of_another_size_or_lost_is_found_on_opening(folder, name):
    file = folder / name
    content = file.read_bytes()
    said = name.replace("/train", ": train")
    for other in (content[:-2], content + b"0"):
        file.write_bytes(other)
        with pytest.raises(UserError, match=rf"{said} has \d+ bytes, the manifest says"):
            Corpus(folder)
    file.unlink()
    with pytest.raises(UserError, match=f"{said} is missing"):
        Corpus(folder)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_changed_bit_in_any_file_ends_verify_with_2_and_is_named(corpus_path, tmp_path, capsys):
    corpus = shutil.copytree(corpus_path, tmp_path / "corpus")
    files = [*corpus.rglob("*.npy"), *(corpus / "tokenizer").iterdir()]
    assert len(files) > 8
    for file in files:
        flip(file)
        assert main(["verify", str(corpus)]) == 2
        err = capsys.readouterr().err
        assert file.name in err and err.count("\n") == 1
        flip(file)
    assert main(["verify", str(corpus)]) == 0
    said = capsys.readouterr()
    assert "as prepare wrote" in said.out and not said.err


# --corpus names one corpus or several.


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("corpora/mine", {"": "corpora/mine"}),
        ("gs://bucket/a,b", {"": "gs://bucket/a,b"}),
        ("runs/lr=1/corpus", {"": "runs/lr=1/corpus"}),
        ("en=gs://A,zh=DIR", {"en": "gs://A", "zh": "DIR"}),
        ("en=a/lr=1", {"en": "a/lr=1"}),
    ],
)
def test_a_path_or_names_with_paths(text, paths):
    assert named(text) == paths
    assert list(named(text)) == list(paths)
    assert written(paths) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("en=a,en=b", "en is given twice"),
        ("en=a,b", "'b' is not NAME=PATH"),
        ("en=a,", "'' is not NAME=PATH"),
        ("en=", "'en=' is not NAME=PATH"),
        ("en=a,=b", "'=b' is not NAME=PATH"),
    ],
)
def test_another_form_is_an_error_that_shows_it(text, said):
    with pytest.raises(UserError, match=f"^--corpus {text}: {said}"):
        named(text)


def test_corpora_of_other_tokenizers_are_refused(tmp_path):
    one = Corpus(write_corpus(tmp_path / "one", random_documents(0, 5), special=SPECIAL | {"eod": 99}))
    check_alike({"a": one})
    other = Corpus(write_corpus(tmp_path / "other", random_documents(0, 5), vocab_size=101))
    with pytest.raises(UserError, match="b has other vocabulary than a; prepare all corpora with one tokenizer"):
        check_alike({"a": one, "b": other})
    other = Corpus(write_corpus(tmp_path / "third", random_documents(0, 5)))
    with pytest.raises(UserError, match="b has other special tokens than a"):
        check_alike({"a": one, "b": other})


@pytest.mark.parametrize(
    ("tokenizer", "cased", "said"),
    [
        ("vocab.txt", True, "b has other normalisation .case, accents, white space. than a; prepare all"),
        ("vocab.txt", False, None),
        ("a/tokenizer", False, None),
    ],
)
def test_one_vocabulary_that_is_read_otherwise_is_refused(tmp_path, tokenizer, cased, said):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "."]) + "\n")
    (tmp_path / "text.txt").write_text("A b.")
    for name, given, keeps in (("a", "vocab.txt", False), ("b", tokenizer, cased)):
        told = {"tokenizer": str(tmp_path / given), "heldout": 0.0, "cased": keeps, "processes": 1}
        prepare(Prepare((f"text:{tmp_path}/text.txt",), tmp_path / name, **told), Console(file=io.StringIO()))
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        open_corpora(f"a={tmp_path}/a,b={tmp_path}/b", {})
