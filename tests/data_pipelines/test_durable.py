"""A power cut leaves whole files: content is on disk before a file gets its name, the name before anything goes on."""

import hashlib
import io
import os
import re

import fsspec
import pytest
from rich.console import Console

from data_pipelines.fetch import copy_file
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from data_pipelines.store import files
from pretrain.storage import run_directory
from tests.texts import write_texts

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux")


@pytest.fixture
def order(monkeypatch):
    """What is synced and renamed, in order: ("sync", path) and ("name", new, place)."""
    seen, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        seen.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def named(new, place):
        seen.append(("name", str(new), str(place)))
        replace(new, place)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    return seen


def downloaded(path, content):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/corpus/tokens.npy", content)
    file = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    copy_file("memory://corpus", "tokens.npy", file, path, ".partial")


@pytest.mark.parametrize(
    ("write", "name", "suffix"),
    [
        (lambda path: run_directory.write_whole(path, "text"), "run.json", ".partial"),
        (lambda path: downloaded(path, b"text"), "tokens.npy", ".partial"),
        (lambda path: files.write_json(path, {}), "manifest.json", ".new"),
    ],
)
def test_a_file_is_on_disk_before_it_is_named_and_its_name_after(tmp_path, order, write, name, suffix):
    write(tmp_path / name)
    new, place = f"{tmp_path / name}{suffix}", str(tmp_path / name)
    assert order == [("sync", new), ("name", new, place), ("sync", str(tmp_path))]


def test_all_of_a_corpus_is_on_disk_before_its_manifest(tmp_path, order):
    source, out = write_texts(tmp_path / "texts", documents=20, seed=0), tmp_path / "corpus"
    prepare(Prepare((f"text:{source}",), out, vocab_size=200, heldout=0.2, processes=1), Console(file=io.StringIO()))
    names = {str(place): at for at, (kind, *rest) in enumerate(order) if kind == "name" for place in rest[1:]}
    synced = lambda path, first, last: ("sync", str(path)) in order[first:last]
    manifest = names[str(out / "manifest.json")]
    part = out / "parts" / "000000"
    assert synced(out / "parts", names[str(part)], manifest)
    made = next(new for kind, new, place in (e for e in order if e[0] == "name") if place == str(part))
    arrays = [file for file in part.rglob("*") if file.is_file()]
    assert len(arrays) == 2 * 5 + 2
    for file in arrays:
        assert synced(f"{made}/{file.relative_to(part)}", 0, names[str(part)])
    assert any(re.search("/unit-[^/]*/tokens.npy", path) for kind, path, *_ in order if kind == "sync")  # of a unit
    for folder in (out / "tokenizer", out / "tables"):
        made = next(new for kind, new, place in (e for e in order if e[0] == "name") if place == str(folder))
        for file in folder.iterdir():
            assert synced(f"{made}/{file.name}", 0, names[str(folder)])
        assert names[str(folder)] < manifest
