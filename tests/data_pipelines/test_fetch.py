"""A corpus in a bucket of Google's is copied once per host, whole or not at all, whoever is killed or waits."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipelines import cloud, fetch
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.manifest import parts_of
from tests.data_pipelines.prepare.forks import Fork

SOURCE = "gs://bucket/some/corpus"


@pytest.fixture
def bucket(storage, corpus_path):
    """The storage, with the corpus at SOURCE."""
    storage.upload_folder(corpus_path, "bucket", "some/corpus")
    return storage


def arrays_read(storage):
    """The names of the corpus's files whose content was read, without the manifest."""
    return [name for name in storage.reads if not name.endswith("manifest.json")]


def copied(source=SOURCE):
    """{name: content} of all that a copy holds, as `content` of the corpus's own folder."""
    copy = fetch.open_copy(source)
    found = content(copy.folder)
    for number, part in enumerate(parts_of(json.loads(found["manifest.json"]))):
        for name in part.files:
            with copy.file(number, name) as path:
                found[(Path(part.path) / name).as_posix()] = path.read_bytes()
    return found


def content(folder):
    """{name: content} of a folder's files, without those that only `prepare` reads: summaries of parts, and plans."""
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    read = [file for file in files if file.name != "summary.json" and file.parent.name != "plans"]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in read}


def verify():
    Corpus(SOURCE).verify()


def test_the_copy_is_the_corpus_and_is_made_once(bucket, corpus_path, tmp_path):
    assert copied() == content(corpus_path)
    corpus, local = Corpus(SOURCE), Corpus(corpus_path)
    assert corpus.path.is_relative_to(tmp_path / "cache" / "pretrain" / "corpora")
    assert corpus.source == SOURCE and corpus.fingerprint == local.fingerprint
    bucket.reads.clear()
    assert copied(f"{SOURCE}/") == content(corpus_path)
    assert bucket.reads == ["some/corpus/manifest.json"]


def test_a_killed_copy_is_never_used_and_is_continued(bucket, corpus_path):
    bucket.delay = 0.2
    fork = Fork(verify)
    while sum(name.endswith(".npy") for name in arrays_read(bucket)) < 3:
        assert fork.process.is_alive()
        time.sleep(0.01)
    fork.process.kill()
    fork.wait()
    finished, bucket.delay = set(arrays_read(bucket)[:-1]), 0.0
    bucket.reads.clear()
    assert copied() == content(corpus_path)
    assert not finished & set(arrays_read(bucket))


def test_of_several_processes_one_copies_and_the_others_wait(bucket):
    bucket.delay = 1.0  # of each file, until one waits
    forks = [Fork(verify) for _ in range(3)]
    said = 0
    while not said and any(fork.process.is_alive() for fork in forks):
        said = sum(fork.said[1].poll(0.05) for fork in forks)
    bucket.delay = 0.0
    ended = [fork.wait() for fork in forks]
    assert [status for status, *_ in ended] == [0, 0, 0]
    assert any("waiting for another process" in errors for *_, errors in ended)
    assert len(arrays_read(bucket)) == len(set(arrays_read(bucket)))


@pytest.mark.parametrize(
    ("refuse", "source", "said"),
    [
        ((403, "robot has no access"), SOURCE, "no access .*robot.*roles/storage"),
        ((401, "Anonymous caller"), SOURCE, "no access .*Anonymous.*gcloud auth appl"),
        (None, "gs://other/corpus", "no such bucket or object"),
    ],
)
def test_what_google_refuses_is_one_line(bucket, refuse, source, said):
    bucket.refuse = refuse
    with pytest.raises(UserError, match=f"^--corpus {source}: .*{said}") as raised:
        copied(source)
    assert "\n" not in str(raised.value)


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
