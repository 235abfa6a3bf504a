"""--corpus names one corpus or several."""

import contextlib
import io

import pytest
from rich.console import Console

from data_pipelines.corpora import check_alike, named, open_corpora, written
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from tests.data_pipelines.corpora import SPECIAL, random_documents, write_corpus


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
        ("en=a,b", "'b' is no NAME=PATH"),
        ("en=a,", "'' is no NAME=PATH"),
        ("en=", "'en=' is no NAME=PATH"),
        ("en=a,=b", "'=b' is no NAME=PATH"),
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
