"""A corpus in a bucket is copied once per host, whole or not at all, and what is wrong with it is one line."""

import hashlib
import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from data_pipelines import cloud, fetch
from data_pipelines.__main__ import main
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError

ROOT = Path(__file__).parent.parent.parent
SOURCE = "gs://bucket/some/corpus"
OPEN = f"from data_pipelines.corpus import Corpus; Corpus({SOURCE!r}).verify()"
SECOND = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}


@pytest.fixture
def bucket(storage, corpus_path):
    """The storage, with the corpus at SOURCE."""
    storage.upload_folder(corpus_path, "bucket", "some/corpus")
    return storage


def arrays_read(storage):
    """The names of the corpus's files whose content was read, without the manifest."""
    names = [name.removeprefix("some/corpus/") for name in storage.reads]
    return [name for name in names if name != "manifest.json"]


def content(folder):
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()
    }


def change(storage, name, change):
    """Replace an object by what a function makes of it."""
    key = "bucket", f"some/corpus/{name}"
    storage.put(*key, change(storage.objects[key][0]))


def change_manifest(storage, change_fields):
    def changed(text):
        manifest = json.loads(text)
        change_fields(manifest)
        return json.dumps(manifest).encode()

    change(storage, "manifest.json", changed)


def refusal(source=SOURCE):
    with pytest.raises(UserError) as caught:
        Corpus(source)
    message = str(caught.value)
    assert message.startswith("--corpus gs://") and "\n" not in message
    return message


def test_the_copy_is_the_corpus_and_is_made_once(bucket, corpus_path, tmp_path):
    corpus, local = Corpus(SOURCE), Corpus(corpus_path)
    assert content(corpus.path) == content(corpus_path)
    assert corpus.path == tmp_path / "cache" / "pretrain" / "corpora" / local.fingerprint
    assert corpus.source == SOURCE and corpus.lengths("train").tolist() == local.lengths("train").tolist()
    bucket.reads.clear()
    assert Corpus(f"{SOURCE}/").path == corpus.path
    assert bucket.reads == ["some/corpus/manifest.json"]


def test_a_worker_process_opens_the_copy(bucket):
    corpus = Corpus(SOURCE)
    bucket.refuse = 403, "no more"
    assert pickle.loads(pickle.dumps(corpus)).path == corpus.path


def test_a_file_of_many_blocks_arrives_in_order(bucket, corpus_path, monkeypatch):
    monkeypatch.setattr(fetch, "BLOCK", 300)
    corpus = Corpus(SOURCE)
    assert content(corpus.path) == content(corpus_path)
    assert bucket.reads.count("some/corpus/train/tokens.npy") > 2 * fetch.ASKED_AT_ONCE


def test_progress_is_shown(bucket, capsys, monkeypatch):
    monkeypatch.setattr(fetch, "SAY_EVERY", 0)
    Corpus(SOURCE)
    said = capsys.readouterr().err
    assert f"copying {SOURCE} to " in said and "MB/s" in said and "the copy is whole" in said


def test_what_an_earlier_copy_left_is_checked_and_completed(bucket, corpus_path):
    folder = fetch.cache() / Corpus(corpus_path).fingerprint
    shutil.copytree(corpus_path, folder)
    (folder / "manifest.json").unlink()
    (folder / "train" / "sentences.npy").unlink()
    (folder / "train" / "sentences.npy.partial").write_bytes(b"half")
    tokens = bytearray((folder / "train" / "tokens.npy").read_bytes())
    tokens[-1] ^= 1
    (folder / "train" / "tokens.npy").write_bytes(tokens)
    assert content(Corpus(SOURCE).path) == content(corpus_path)
    assert sorted(arrays_read(bucket)) == ["train/sentences.npy", "train/tokens.npy"]


def test_a_copy_that_lost_a_file_is_completed(bucket, corpus_path):
    (Corpus(SOURCE).path / "train" / "tokens.npy").unlink()
    bucket.reads.clear()
    assert content(Corpus(SOURCE).path) == content(corpus_path)
    assert arrays_read(bucket) == ["train/tokens.npy"]


def test_a_killed_copy_is_never_used_and_is_continued(bucket, corpus_path):
    bucket.delay = 0.2
    process = subprocess.Popen([sys.executable, "-c", OPEN], **SECOND)
    while len(arrays_read(bucket)) < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folder = fetch.cache() / Corpus(corpus_path).fingerprint
    assert not (folder / "manifest.json").exists()
    finished, bucket.delay = set(arrays_read(bucket)[:3]), 0.0
    bucket.reads.clear()
    assert {name: (folder / name).read_bytes() for name in finished}.items() <= content(Corpus(SOURCE).path).items()
    assert not finished & set(arrays_read(bucket))
    assert content(folder) == content(corpus_path)


def test_of_several_processes_one_copies_and_the_others_wait(bucket, corpus_path):
    bucket.delay = 0.1
    processes = [subprocess.Popen([sys.executable, "-c", OPEN], **SECOND) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert sorted(arrays_read(bucket)) == sorted(set(content(corpus_path)) - {"manifest.json"})
    assert sum("copying gs://" in one for one in said) == 1


def test_another_tokenizer_of_the_same_tokens_replaces_the_copy_s(bucket):
    """The fingerprint is that of the tokens; settings of the tokenizer may differ all the same."""
    Corpus(SOURCE)
    change(bucket, "tokenizer/tokenizer_config.json", lambda _: b"{}")

    def rewrite(manifest):
        manifest["tokenizer"]["tokenizer/tokenizer_config.json"] = {
            "bytes": 2,
            "sha256": hashlib.sha256(b"{}").hexdigest(),
        }

    change_manifest(bucket, rewrite)
    bucket.reads.clear()
    assert (Corpus(SOURCE).tokenizer_path / "tokenizer_config.json").read_text() == "{}"
    assert arrays_read(bucket) == ["tokenizer/tokenizer_config.json"]


def test_a_corpus_of_before_its_tokenizer_was_hashed_is_copied_too(bucket, corpus_path):
    change_manifest(bucket, lambda manifest: manifest.pop("tokenizer"))
    copied, original = content(Corpus(SOURCE).path), content(corpus_path)
    assert copied.keys() == original.keys()
    assert all(copied[name] == original[name] for name in copied if name != "manifest.json")


def test_the_hashes_of_the_tokenizer_are_in_the_manifest(corpus_path):
    listed = json.loads((corpus_path / "manifest.json").read_text())["tokenizer"]
    files = {name: text for name, text in content(corpus_path).items() if name.startswith("tokenizer/")}
    assert {name: entry["sha256"] for name, entry in listed.items()} == {
        name: hashlib.sha256(text).hexdigest() for name, text in files.items()
    }


FLIPPED = lambda text: text[:-1] + bytes([text[-1] ^ 1])
# What is wrong -> (how, what the line says)
WRONG = {
    "a flipped bit": (lambda s: change(s, "train/tokens.npy", FLIPPED), r"train/tokens.npy is not what prepare wrote"),
    "of the tokenizer": (lambda s: change(s, "tokenizer/vocab.txt", FLIPPED), r"vocab.txt is not what prepare wrote"),
    "cut": (lambda s: change(s, "train/tokens.npy", lambda text: text[:-2]), r"tokens.npy has \d+ bytes, the manifest"),
    "lost": (lambda s: s.objects.pop(("bucket", "some/corpus/train/tokens.npy")), "train/tokens.npy is missing; copy"),
    "no manifest": (lambda s: s.objects.pop(("bucket", "some/corpus/manifest.json")), "no such bucket or object"),
    "refused": (lambda s: setattr(s, "refuse", (403, "robot has no access")), "no access .*robot.*roles/storage"),
    "no login": (lambda s: setattr(s, "refuse", (401, "Anonymous caller")), "no access .*Anonymous.*gcloud auth appl"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_in_the_bucket_is_one_line_and_no_copy_remains_in_use(kind, bucket, corpus_path):
    spoil, said = WRONG[kind]
    spoil(bucket)
    for _ in range(2):  # the second time too
        with pytest.raises(UserError, match=said):
            Corpus(SOURCE)
        assert SOURCE in refusal()
    assert not (fetch.cache() / Corpus(corpus_path).fingerprint / "manifest.json").exists()


def test_no_such_bucket_and_another_version_are_one_line(bucket):
    assert "no such bucket or object" in refusal("gs://other/corpus")
    change_manifest(bucket, lambda manifest: manifest.update(version=2))
    with pytest.raises(UserError, match="corpus gs://bucket/some/corpus has format version 2"):
        Corpus(SOURCE)
    assert arrays_read(bucket) == []


def test_a_disk_that_is_too_small_is_said_before_anything_is_copied(bucket, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    assert "are to be copied to" in refusal() and "XDG_CACHE_HOME" in refusal()
    assert arrays_read(bucket) == []


def test_a_cache_that_cannot_be_written_is_named(bucket, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be copied to" in refusal() and "XDG_CACHE_HOME" in refusal()


def test_statistics_are_shown_from_the_bucket(bucket, capsys):
    assert main(["show", SOURCE]) == 0
    assert "tokens per document" in capsys.readouterr().out


def test_prepare_writes_to_local_folders_only(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "--source", "builtin", "--out", "gs://bucket/corpus"]) == 2
    assert "--out gs://bucket/corpus: give a local path" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_without_gcsfs_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(cloud.importlib.util, "find_spec", lambda name: None)
    cloud._configure.cache_clear()
    with pytest.raises(UserError, match="gs:// paths need gcsfs: pip install -r requirements-gcs.txt"):
        cloud.place("gs://bucket/corpus")
    cloud._configure.cache_clear()


def test_a_local_corpus_needs_none_of_it(corpus_path):
    code = (
        f"import sys; from data_pipelines.corpus import Corpus; Corpus({str(corpus_path)!r}).lengths('train')\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'gcsfs', 'fsspec', 'etils', 'aiohttp'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def test_reads_past_the_ends_are_as_from_a_local_corpus(bucket, corpus_path):
    starts = np.array([-3, 0, 17])
    rows = [Corpus(where).read("train", "tokens", starts, 8) for where in (SOURCE, corpus_path)]
    assert np.array_equal(*rows)
