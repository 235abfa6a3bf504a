"""A stored corpus opens, reads what was written, and says in one line what is wrong with it."""

import errno
import json
import pickle

import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.store.fields import BY_TOKEN, Field
from tests.data_pipelines.corpora import numbered, write_corpus

SHAPE = [[3, 4], [5], [2, 2, 2]]


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


def test_a_corpus_travels_to_another_process_as_its_path(folder):
    corpus = Corpus(folder)
    corpus.parts[0].read("train", "tokens", np.array([0]), 4)  # opens the maps
    assert len(pickle.dumps(corpus)) < 1000
    again = pickle.loads(pickle.dumps(corpus))
    assert again.fingerprint == corpus.fingerprint and again.parts[0].lengths("train").tolist() == [7, 5, 6]


def change_manifest(folder, **changes):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_disk_that_fails_while_a_corpus_is_read_is_named_and_not_the_work_directory(folder, monkeypatch):
    corpus = Corpus(folder)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(UserError, match=r"corpus .*parts/000000/train/tokens\.npy cannot be read \(Input/output"):
        corpus.parts[0].read("train", "tokens", np.array([0]), 4)


def test_a_missing_folder_a_stranger_and_an_unfinished_corpus_are_named_as_such(tmp_path):
    with pytest.raises(UserError, match="does not exist; make it with"):
        Corpus(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        Corpus(tmp_path)
    (tmp_path / ".partial").mkdir()
    with pytest.raises(UserError, match="unfinished; rerun"):
        Corpus(tmp_path)


def test_an_unknown_version_and_a_broken_manifest_are_errors(folder):
    change_manifest(folder, version=3)
    with pytest.raises(UserError, match="format version 3 and this program reads 2"):
        Corpus(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        Corpus(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": None},
        {"vocab_size": 10**30},
        {"special": {"pad": 10**9}},
        {"special": None},
        {"counts": None},
        {"parts": []},
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_an_error(folder, change):
    change_manifest(folder, **change)
    with pytest.raises(UserError, match=r"manifest\.json is not as prepare wrote it"):
        Corpus(folder)


def test_a_file_of_another_size_or_lost_is_found_on_opening(folder):
    file = folder / "parts" / "000000" / "train" / "tokens.npy"
    content = file.read_bytes()
    for other in (content[:-2], content + b"0"):
        file.write_bytes(other)
        with pytest.raises(UserError, match=r"parts/000000: train/tokens\.npy has \d+ bytes, the manifest says"):
            Corpus(folder)
    file.unlink()
    with pytest.raises(UserError, match=r"parts/000000: train/tokens\.npy is missing"):
        Corpus(folder)


def test_a_table_of_another_size_is_found_on_opening(folder):
    (folder / "tables" / "word_starts.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"tables/word_starts\.npy has 0 bytes, the manifest says"):
        Corpus(folder)
