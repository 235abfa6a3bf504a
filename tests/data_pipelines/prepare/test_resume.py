"""What an unfinished corpus was begun with it goes on with, or an error says what has changed, and the cure."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from data_pipelines.__main__ import main
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.formats import source
from data_pipelines.prepare import partial, parts
from data_pipelines.prepare.command import faults
from data_pipelines.processes import pool
from data_pipelines.text.steps import STEPS
from tests.data_pipelines.prepared import documents, run, write_character_vocabulary


@pytest.fixture
def unfinished(a_txt, tmp_path, monkeypatch):
    """A corpus whose making was interrupted, of the text in a.txt."""
    with monkeypatch.context() as patched:
        patched.setattr(parts, "write_part", None)
        with pytest.raises(TypeError):
            run(tmp_path / "out", f"text:{tmp_path}/a.txt", steps=("tags",))
    return tmp_path / "out"


def again(out, **options):
    return run(out, f"text:{out.parent}/a.txt", **{"steps": ("tags",)} | options)


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "flipped": _flip,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_written_down_and_is_damaged_is_named_and_beginning_anew_cures(unfinished, damage):
    DAMAGE[damage](unfinished / ".partial" / "state.json")
    with pytest.raises(UserError, match=r"is damaged; delete \S+\.partial and start the same command again"):
        again(unfinished)
    shutil.rmtree(unfinished / ".partial")
    again(unfinished)
    assert documents(unfinished) == [["Some text ."]]


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt"])
def test_a_copy_of_the_tokenizer_that_is_damaged_is_made_again(unfinished, name):
    _flip(unfinished / ".partial" / "arrays" / "tokenizer" / name)
    again(unfinished)
    assert documents(unfinished) == [["Some text ."]]
    Corpus(unfinished).verify()


@pytest.mark.parametrize("damage", [os.remove, DAMAGE["cut"]])
def test_a_folder_without_a_summary_is_no_part_and_is_made_again(a_txt, tmp_path, damage):
    (tmp_path / "b.txt").write_text("Some text.")
    run(tmp_path / "out", f"text:{tmp_path}/?.txt", part="0/1")
    damage(tmp_path / "out" / "parts" / "000000" / "summary.json")
    with pytest.raises(UserError, match="1 of 1 parts are missing"):
        run(tmp_path / "out", f"text:{tmp_path}/?.txt", finish=True)
    run(tmp_path / "out", f"text:{tmp_path}/?.txt")
    Corpus(tmp_path / "out").verify()


def test_other_settings_and_an_edit_of_the_same_size_are_noticed(unfinished):
    with pytest.raises(UserError, match="heldout was 0.0 and is 0.5"):
        again(unfinished, heldout=0.5)
    (unfinished.parent / "a.txt").write_text("Same size!")
    with pytest.raises(UserError, match=r"sources have changed since it began \(\S+a.txt has changed\): restore"):
        again(unfinished)


@pytest.mark.parametrize("library", ["tokenizers", "sentencex", "sentencepiece"])
def test_another_version_of_a_library_is_named_with_the_one_to_install(unfinished, monkeypatch, library):
    here = partial.versions()
    monkeypatch.setattr(partial, "versions", lambda *_: here | {library: "99.1"})
    with pytest.raises(UserError) as raised:
        again(unfinished)
    assert f"{library} was {here[library]} and is 99.1: pip install " in str(raised.value)
    assert f"{library}=={here[library]}" in str(raised.value)
    monkeypatch.undo()
    again(unfinished)
    assert documents(unfinished) == [["Some text ."]]


def test_another_version_of_a_step_is_named(unfinished, monkeypatch):
    monkeypatch.setitem(STEPS, "tags", STEPS["tags"]._replace(version=2))
    with pytest.raises(UserError, match="step tags was 1 and is 2: use the Python and the commit that began it"):
        again(unfinished)


def test_the_name_of_a_source_may_be_no_utf_8(tmp_path, capfdbinary):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/f\xff")
    os.mkdir(folder)
    vocabulary = write_character_vocabulary(tmp_path / "vocab.txt")
    (Path(folder) / "a.txt").write_text("Some text.")
    given = ["prepare", "--source", f"text:{folder}", "--out", f"{tmp_path}/out", "--tokenizer", str(vocabulary)]
    for said in (b"out/train: 1 documents", b"already finished"):
        assert main([*given, "--cased", "--processes=1"]) == 0
        assert said in capfdbinary.readouterr().out
    assert main(["show", f"{tmp_path}/out"]) == 0


def test_a_file_system_that_cannot_lock_is_no_obstacle(a_txt, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for number in (errno.ENOLCK, errno.EOPNOTSUPP):
        run(tmp_path / f"{number}", f"text:{tmp_path}/a.txt")
    number = errno.EIO
    with pytest.raises(UserError, match="may pass"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt")


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_said_with_its_likely_reason():
    said = "--processes 2: a worker was killed, maybe for memory; use fewer"
    with pytest.raises(UserError, match=said), pool(2) as workers:
        workers.submit(_die).result()


def test_a_file_that_changes_while_others_are_read_is_no_part_of_the_corpus(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("Some text.")
    monkeypatch.setattr(source, "SHARD", 10)
    real = parts.write_unit

    def changing(*given):
        real(*given)
        (tmp_path / "b.txt").write_text("Same size!")

    monkeypatch.setattr(parts, "write_unit", changing)
    with pytest.raises(UserError, match="b.txt has changed since prepare began; restore it, or start over"):
        run(tmp_path / "out", f"text:{tmp_path}/?.txt")


def test_a_corpus_that_cannot_grow_is_left_alone(a_txt, tmp_path):
    run(tmp_path / "out", f"text:{tmp_path}/a.txt")
    file = tmp_path / "out" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in manifest.items() if name != "stages"}))
    with pytest.raises(UserError, match="not made by prepare; use another --out"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt")


def test_the_source_is_no_place_for_the_corpus(a_txt, tmp_path):
    with pytest.raises(UserError, match=f"--out {tmp_path}: --source text:{tmp_path}/ reads it; use another"):
        run(tmp_path, f"text:{tmp_path}/")


PLACE = Path("/data/corpus")


@pytest.mark.parametrize(
    "code, path, said",
    [
        (errno.ENOSPC, None, "--out /data/corpus: cannot write there .*free space"),
        (errno.EDQUOT, "/data/corpus/x", "--out /data/corpus: cannot write there .*free space"),
        (errno.EACCES, "/texts/a.txt", "--source: cannot read /texts/a.txt .*make it readable or leave it out"),
        (errno.EACCES, "/data/corpus/x", "--out /data/corpus: cannot write there .*choose another directory"),
        (errno.ENOENT, "/data/corpus/x", "/data/corpus/x: .*another process makes the same corpus, wait for it; start"),
        (errno.ENOTEMPTY, "part.27", "part.27: .*if another process makes the same corpus, wait for it; start"),
        (errno.EIO, "/texts/a.txt", "/texts/a.txt: reading or writing failed .*may pass; start the same command again"),
    ],
)
def test_a_fault_has_its_own_cure(code, path, said):
    error = OSError(code, os.strerror(code), path)
    with pytest.raises(UserError, match=f"^{said}") as raised, faults(PLACE, 2):
        raise error
    assert (raised.value.status == 134) == bool(re.search("may pass|wait for it", str(raised.value)))
    assert ("free space" in str(raised.value)) == (code in (errno.ENOSPC, errno.EDQUOT))


def test_memory_that_runs_out_is_said():
    with pytest.raises(UserError, match="--processes 2: memory ran out; use fewer"), faults(PLACE, 2):
        raise MemoryError


@pytest.mark.timeout(30)
def test_who_interrupts_does_not_wait_for_what_processes_have_begun():
    with pytest.raises(KeyboardInterrupt), pool(2) as workers:
        workers.submit(time.sleep, 60)
        raise KeyboardInterrupt
