"""A corpus made into a bucket is the one made on a disk; a part's summary is the last of it to be there."""

import io
import tempfile

import pytest
from rich.console import Console

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from tests.data_pipelines.prepared import content

OUT = "gs://bucket/some/corpus"


@pytest.fixture(autouse=True)
def scratch(small, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()


def make(out, text, *more, **options):
    given = Prepare((f"text:{text}", *more), cloud.place(out), vocab_size=200, part_size=1, processes=1, **options)
    return prepare(given, Console(file=io.StringIO(), width=300))


def stored(storage):
    return {name.removeprefix("some/corpus/"): content for (_, name), (content, _) in storage.objects.items()}


def test_its_bytes_are_those_on_a_disk_and_nothing_is_left_behind(storage, text, tmp_path):
    make(tmp_path / "out", text)
    make(OUT, text)
    assert stored(storage) == content(tmp_path / "out")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert make(OUT, text)["fingerprint"]


def test_shares_meet_in_the_bucket_and_its_corpus_grows(storage, text, tmp_path):
    make(tmp_path / "out", text)
    make(tmp_path / "out", text / "00.txt", append=True)
    for share in ("0/2", "1/2"):
        make(OUT, text, part=share)
    with pytest.raises(UserError, match="vocab_size was 200 and is 300"):
        prepare(Prepare((f"text:{text}",), cloud.place(OUT), vocab_size=300, part_size=1, finish=True), Console())
    assert "manifest.json" not in stored(storage)
    make(OUT, text, finish=True)
    make(OUT, text / "00.txt", append=True)
    assert stored(storage) == content(tmp_path / "out")


def test_a_part_is_there_when_its_summary_is(storage, text, monkeypatch):
    """An upload that ends before that is made again."""
    real, sent = cloud.upload_file, []

    def failing(file, to):
        sent.append(to.name)
        if to.name == "summary.json" and sent.count("summary.json") == 2:
            raise TimeoutError("timed out")
        real(file, to)

    with monkeypatch.context() as patched:
        patched.setattr(cloud, "upload_file", failing)
        patched.setattr(cloud, "PAUSES", ())
        with pytest.raises(UserError, match="may pass; start the same command again"):
            make(OUT, text)
    assert sum(name.endswith("summary.json") for name in stored(storage)) == 1
    assert sum(name.endswith("train/tokens.npy") for name in stored(storage)) == 2
    make(OUT, text)
    assert sum(name.endswith("summary.json") for name in stored(storage)) == 6
