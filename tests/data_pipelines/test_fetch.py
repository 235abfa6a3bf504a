"""Files of a corpus in a bucket are copied once per host, whole or not at all; what is wrong with them is one line."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from data_pipelines import cloud, fetch
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.manifest import parts_of

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


def copied(source=SOURCE):
    """{name: content} of all that a copy holds, as `content` of the corpus's own folder."""
    copy = fetch.open_copy(source)
    found = content(copy.folder)
    for number, part in enumerate(parts_of(json.loads(found["manifest.json"]))):
        for name in part.files:
            with copy.file(number, name) as path:
                found[(Path(part.path) / name).as_posix()] = path.read_bytes()
    return found


def arrays(folder):
    """The local copy's folder of the first part."""
    [first, *_] = parts_of(json.loads((folder / "manifest.json").read_text()))
    return fetch.cache() / first.fingerprint


def content(folder):
    """{name: content} of a folder's files, without those that only `prepare` reads: summaries of parts, and plans."""
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    read = [file for file in files if file.name != "summary.json" and file.parent.name != "plans"]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in read}


def name_of(storage, end):
    """The name in the corpus of the file whose name ends so."""
    [name] = [name for name in storage.names("bucket") if name.endswith(end)]
    return name.removeprefix("some/corpus/")


def change(storage, end, change):
    """Replace an object by what a function makes of it."""
    key = "bucket", f"some/corpus/{name_of(storage, end)}"
    storage.put(*key, change(storage.objects[key][0]))


def change_manifest(storage, change_fields):
    def changed(text):
        manifest = json.loads(text)
        change_fields(manifest)
        return json.dumps(manifest).encode()

    change(storage, "manifest.json", changed)


def refusal(source=SOURCE):
    with pytest.raises(UserError) as caught:
        copied(source)
    message = str(caught.value)
    assert message.startswith("--corpus gs://") and "\n" not in message
    return message


def test_the_copy_is_the_corpus_and_is_made_once(bucket, corpus_path, tmp_path):
    assert copied() == content(corpus_path)
    corpus, local = Corpus(SOURCE), Corpus(corpus_path)
    assert corpus.path.is_relative_to(tmp_path / "cache" / "pretrain" / "corpora")
    assert corpus.source == SOURCE and corpus.fingerprint == local.fingerprint
    bucket.reads.clear()
    assert copied(f"{SOURCE}/") == content(corpus_path)
    assert bucket.reads == ["some/corpus/manifest.json"]


def test_what_an_earlier_copy_left_is_completed(bucket, corpus_path):
    copied()
    folder = arrays(Corpus(SOURCE).path) / "train"
    (folder / "sentences.npy").unlink()
    (folder / "sentences.npy.partial").write_bytes(b"half")
    bucket.reads.clear()
    assert copied() == content(corpus_path)
    assert arrays_read(bucket) == [name_of(bucket, "train/sentences.npy")]
    assert not list(folder.glob("*.partial"))


def test_a_killed_copy_is_never_used_and_is_continued(bucket, corpus_path):
    bucket.delay = 0.2
    process = subprocess.Popen([sys.executable, "-c", OPEN], **SECOND)
    while sum(name.endswith(".npy") for name in arrays_read(bucket)) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished, bucket.delay = set(arrays_read(bucket)[:-1]), 0.0
    bucket.reads.clear()
    assert copied() == content(corpus_path)
    assert not finished & set(arrays_read(bucket))


def test_of_several_processes_one_copies_and_the_others_wait(bucket):
    bucket.delay = 1.0  # of each file, until one waits
    reader, writer = os.pipe()
    where = {"stdout": writer, "stderr": writer, "cwd": ROOT}
    processes = [subprocess.Popen([sys.executable, "-c", OPEN], **where) for _ in range(3)]
    os.close(writer)
    said = []
    with os.fdopen(reader) as lines:
        for line in lines:
            said.append("waiting for another process" in line)
            bucket.delay = 0.0 if any(said) else bucket.delay
    assert [process.wait() for process in processes] == [0, 0, 0] and any(said)
    assert len(arrays_read(bucket)) == len(set(arrays_read(bucket)))


def test_another_tokenizer_of_the_same_tokens_stands_beside_the_copy_s(bucket):
    first = Corpus(SOURCE)
    first.verify()
    change(bucket, "tokenizer/tokenizer_config.json", lambda _: b"{}")

    def rewrite(manifest):
        manifest["tokenizer"]["tokenizer/tokenizer_config.json"] = {
            "bytes": 2,
            "sha256": hashlib.sha256(b"{}").hexdigest(),
        }

    change_manifest(bucket, rewrite)
    bucket.reads.clear()
    before = content(first.tokenizer_path)
    assert (Corpus(SOURCE).tokenizer_path / "tokenizer_config.json").read_text() == "{}"
    assert content(first.tokenizer_path) == before  # a job that reads it goes on with what it opened
    assert not any(name.startswith("parts/") for name in arrays_read(bucket))


FLIPPED = lambda text: text[:-1] + bytes([text[-1] ^ 1])
# What is wrong -> (how, what the line says)
WRONG = {
    "a flipped bit": (lambda s: change(s, "train/tokens.npy", FLIPPED), r"train/tokens.npy is not what prepare wrote"),
    "of the tokenizer": (lambda s: change(s, "tokenizer/vocab.txt", FLIPPED), r"vocab.txt is not what prepare wrote"),
    "cut": (lambda s: change(s, "train/tokens.npy", lambda text: text[:-2]), r"tokens.npy has \d+ bytes, the manifest"),
    "lost": (lambda s: lose(s, "train/tokens.npy"), "train/tokens.npy is missing; copy"),
    "no manifest": (lambda s: lose(s, "manifest.json"), "no such bucket or object"),
    "refused": (lambda s: setattr(s, "refuse", (403, "robot has no access")), "no access .*robot.*roles/storage"),
    "no login": (lambda s: setattr(s, "refuse", (401, "Anonymous caller")), "no access .*Anonymous.*gcloud auth appl"),
}


def lose(storage, end):
    del storage.objects["bucket", f"some/corpus/{name_of(storage, end)}"]


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_in_the_bucket_is_one_line_and_stays_so(kind, bucket):
    spoil, said = WRONG[kind]
    spoil(bucket)
    for _ in range(2):  # the second time too
        with pytest.raises(UserError, match=said):
            copied()
        assert SOURCE in refusal()


def test_no_such_bucket_and_another_version_are_one_line(bucket):
    assert "no such bucket or object" in refusal("gs://other/corpus")
    change_manifest(bucket, lambda manifest: manifest.update(version=9))
    with pytest.raises(UserError, match="corpus gs://bucket/some/corpus has format version 9"):
        Corpus(SOURCE)
    assert arrays_read(bucket) == []


def test_a_disk_that_is_too_small_is_said_before_an_array_is_copied(bucket, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=20))
    assert re.search("cannot be copied.*are to be copied.*are free.*free space.*XDG_CACHE_HOME", refusal())
    assert not any(name.startswith("parts/") for name in arrays_read(bucket))


def test_a_cache_that_cannot_be_written_is_named(bucket, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be copied to" in refusal() and "XDG_CACHE_HOME" in refusal()


def test_without_gcsfs_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(cloud.importlib.util, "find_spec", lambda name: None)
    cloud._configure.cache_clear()
    with pytest.raises(UserError, match="gs:// paths need gcsfs: pip install -r requirements-gcs.txt"):
        cloud.place("gs://bucket/corpus")
    cloud._configure.cache_clear()


def test_a_local_corpus_needs_none_of_it(corpus_path):
    code = (
        "import sys; from data_pipelines.corpus import Corpus\n"
        f"Corpus({str(corpus_path)!r}).parts[0].lengths('train')\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'gcsfs', 'fsspec', 'etils', 'aiohttp'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"
