"""What is read of a corpus is checked beside the reading: damage ends whoever reads it."""

import errno
import hashlib
import pickle
import threading

import numpy as np
import pytest

from data_pipelines import corpus as corpora
from data_pipelines.batches import make_examples
from data_pipelines.corpus import Checks, Corpus, sound
from data_pipelines.errors import PassingError, UserError
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.loader import Loader
from tests.data_pipelines.corpora import random_documents, write_corpus


@pytest.fixture
def path(tmp_path):
    documents = random_documents(0, 30)
    return write_corpus(tmp_path / "corpus", documents, heldout=documents[:6], parts=2)


def damage(path, split="train", name="tokens", value=7):
    """Write another value over the last half of a file of the second part."""
    file = path / "parts/000001" / split / f"{name}.npy"
    array = np.load(file)
    array[len(array) // 2 :] = value
    np.save(file, array)


def read(path, **workers):
    corpus = Corpus(path)
    examples = make_examples(PackedSentences(16), corpus, "train", 8, seed=0)
    with Loader(examples, 0, 40, np.arange(8), **workers) as loader, sound([corpus]):
        return len(list(loader))


@pytest.mark.parametrize(
    "name, value, workers",
    [
        ("tokens", 7, {"processes": 1}),
        ("tokens", 65535, {"threads": 2}),
        ("sentences", 2**40, {"threads": 2}),
        ("documents", -5, {"threads": 2}),
    ],
)
def test_a_damaged_file_ends_who_reads_it_whatever_it_holds(path, workers, name, value):
    assert read(path, threads=2) == 40
    damage(path, name=name, value=value)
    with pytest.raises(UserError) as raised:
        read(path, **workers)
    assert "parts/000001/train/" + name in str(raised.value) and "rerun prepare" in str(raised.value)


def test_a_token_outside_the_vocabulary_is_said_where_it_is_read(path):
    damage(path, value=100)
    part = Corpus(path).parts[1]
    last = np.array([part.sizes["train"]["tokens"] - 4])
    assert part.read("train", "tokens", last * 0, 4).max() < 100
    with pytest.raises(UserError, match="tokens.npy, with token 100 of 100, has changed"):
        part.read("train", "tokens", last, 4)


def test_damage_of_what_nobody_reads_ends_nobody(path):
    damage(path, "heldout")
    assert read(path, threads=1) == 40


def test_each_file_is_hashed_once(path, monkeypatch):
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or digest(file, kind))
    corpus = Corpus(path)
    for _ in range(3):
        corpus.token_counts()
        corpus.release("train", [0, 1])
        corpus.checks.wait()
    assert hashed == [str(path / f"parts/00000{part}/train/token_counts.npy") for part in range(2)]


def test_an_error_waits_seconds_for_what_is_being_hashed_and_not_for_all(path, monkeypatch):
    hashing, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: hashing.set() or go_on.wait() and 0)
    monkeypatch.setattr(corpora, "AFTER_AN_ERROR", 0.01)
    corpus = Corpus(path)
    with pytest.raises(ZeroDivisionError), sound([corpus]):
        corpus.token_counts()
        assert hashing.wait(60)
        raise ZeroDivisionError
    corpus.checks.wait(seconds=0.01)
    go_on.set()


def test_who_only_notes_files_waits_for_none(path):
    corpus = pickle.loads(pickle.dumps(Corpus(path)))
    corpus.token_counts()
    corpus.checks.wait()
    assert len(corpus.checks.take()) == 2


def test_a_copy_that_was_dropped_before_its_turn_is_checked_when_it_is_read_again():
    asked = []

    def check(*file):
        asked.append(file)
        if len(asked) == 1:
            raise FileNotFoundError

    checking = Checks(check)
    for _ in range(3):
        checking.add((0, "train/tokens.npy"))
        checking.wait()
    assert asked == [(0, "train/tokens.npy")] * 2


def test_a_damaged_table_is_an_error_where_it_is_read(path):
    name = "tables/word_starts.npy"
    (path / name).write_bytes((path / name).read_bytes()[:-1] + b"\x07")
    with pytest.raises(UserError, match=f"the content of {name} has changed since it was prepared"):
        Corpus(path).table("word_starts")


def test_a_disk_that_fails_for_now_is_no_damage(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.raises(PassingError, match="cannot be read .Input/output error.; start the same command again"):
        read(path, threads=1)


def test_a_damaged_copy_of_a_corpus_in_a_bucket_is_to_be_deleted(storage, path):
    storage.upload_folder(path, "bucket", "corpus")
    assert read("gs://bucket/corpus", threads=1) == 40
    (copied,) = (path.parent / "cache").rglob(f"{Corpus(path).parts[1].entry.fingerprint}/train/tokens.npy")
    content = bytearray(copied.read_bytes())
    content[-2] ^= 1
    copied.write_bytes(content)
    with pytest.raises(UserError, match="parts/000001/train/tokens.npy has changed .* delete .*/corpora, and the same"):
        read("gs://bucket/corpus", threads=1)
