"""A corpus holds its documents, is split by hash, and does not depend on processes or interruptions."""

import errno
import os
import re
import signal
import sys
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.formats import source
from data_pipelines.formats.problems import REPLACED, SKIPPED
from data_pipelines.prepare import parts as making
from data_pipelines.store import parts
from tests.data_pipelines.prepare.forks import Fork, peak_of_prepare, prepare
from tests.data_pipelines.prepare.small import UNIT
from tests.data_pipelines.prepared import content, documents, run, splits, write_character_vocabulary


def start(text, out, processes=1, **options):
    given = ["--source", f"text:{text}", "--vocab-size", "200", "--out", str(out), f"--processes={processes}"]
    return Fork(partial(prepare, **options), given, UNIT)


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    status, _, errors = start(text, out).wait()
    assert (status, errors) == (0, "")
    return content(out)


def units_of(out):
    return sorted(out.glob(".partial/arrays/*/unit-??????"))


KILLS = [
    ("tokenizers.save", 1),
    ("partial.put_new", 1),  # before the state is there
    ("making.write_unit", 7),
    ("parts.read_unit", 9),  # while counting held-out documents
    ("parts.read_unit", 20),  # while joining
    ("parts.describe_files", 1),
    ("making.put_folder", 1),  # the part's place
    ("job.fingerprint", 1),
    ("ending.write_json", 1),  # everything is in place but the manifest
]


@pytest.mark.parametrize(("function", "call"), KILLS)
def test_killed_anywhere_and_run_again_the_bytes_are_the_same(tmp_path, text, uninterrupted, function, call):
    out = tmp_path / "out"
    assert start(text, out, dies=function, call=call).wait()[0] == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    units, joined = len(units_of(out)), (out / "parts" / "000000").exists()
    status, printed, errors = start(text, out).wait()
    assert status == 0, errors
    assert (f"continuing: 0 parts are done, and {units} of" in printed) == (units > 0 and not joined)
    assert content(out) == uninterrupted
    assert not (out / ".partial").exists()


def test_two_processes_killed_twice_give_the_same_bytes_and_leave_no_process(tmp_path, text, uninterrupted):
    out = tmp_path / "out"
    for wanted in (2, 5):
        running = start(text, out, processes=2)
        while running.process.is_alive() and len(units_of(out)) < wanted:
            time.sleep(0.002)
        running.process.kill()
        running.wait()  # the pipes close when the workers have ended too
    status, _, errors = start(text, out, processes=2).wait()
    assert status == 0, errors
    assert content(out) == uninterrupted


def test_a_finished_corpus_is_left_alone_and_other_settings_are_an_error(a_txt, tmp_path):
    run(tmp_path / "out", f"text:{tmp_path}/a.txt")
    before = content(tmp_path / "out")
    (tmp_path / "a.txt").unlink()
    _, printed = run(tmp_path / "out", f"text:{tmp_path}/a.txt")
    assert "already finished" in printed
    assert content(tmp_path / "out") == before
    with pytest.raises(UserError, match=r"language was \['en'\] and is \['de'\]; undecodable was 'replace'"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt", language=("de",), undecodable="skip")


def test_files_that_have_come_since_are_counted_and_left_to_append(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("Some text.")
    run(tmp_path / "out", f"text:{texts}/*.txt")
    before = content(tmp_path / "out")
    assert "already finished; nothing to do" in run(tmp_path / "out", f"text:{texts}/*.txt")[1]
    (texts / "b.txt").write_text("Another text.")
    printed = run(tmp_path / "out", f"text:{texts}/*.txt")[1]
    assert "source files that are not in it: 1; add them with --append" in printed
    assert content(tmp_path / "out") == before
    with mock.patch("data_pipelines.prepare.command.table.plan", side_effect=OSError(errno.EIO, "failed")):
        assert "already finished; nothing to do" in run(tmp_path / "out", f"text:{texts}/*.txt")[1]


def test_the_files_are_what_the_format_says(tmp_path, text, monkeypatch):
    monkeypatch.setattr(parts, "CHUNK", 1000)
    out = tmp_path / "out"
    manifest, _ = run(out, f"text:{text}", heldout=0.2)
    corpus = Corpus(out)
    corpus.verify()
    assert manifest["version"] == 2
    assert manifest["fields"] == {
        "tokens": {"dtype": "uint16", "shape": [], "per": "token", "kept": "stored"},
        "word_starts": {"dtype": "bool", "shape": [], "per": "token", "kept": "by token"},
        "sources": {"dtype": "uint16", "shape": [], "per": "document", "kept": "stored", "values": [f"text:{text}"]},
        "languages": {"dtype": "uint16", "shape": [], "per": "document", "kept": "stored", "values": ["en"]},
    }
    assert manifest["special"] == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert manifest["sources"] == [{"source": f"text:{text}", "files": 40, "bytes": manifest["sources"][0]["bytes"]}]
    vocabulary = (out / "tokenizer" / "vocab.txt").read_text().split("\n")
    (part,) = corpus.parts
    for split in ("train", "heldout"):
        tokens = np.load(out / "parts" / "000000" / split / "tokens.npy")
        sentences, texts = part.sentences(split), part.documents(split)
        sizes = {"documents": len(texts) - 1, "sentences": len(sentences) - 1, "tokens": len(tokens)}
        assert part.sizes[split] == corpus.size(split) == sizes
        assert sentences[-1] == len(tokens)
        assert texts[-1] == len(sentences) - 1
        assert (np.diff(sentences) > 0).all()
        assert (np.diff(texts) > 0).all()
        word_starts = part.read(split, "word_starts", np.array([0]), len(tokens))[0]
        assert word_starts[sentences[:-1]].all()
        continues = [vocabulary[token].startswith("##") and vocabulary[token] != "##" for token in tokens]
        assert (word_starts != continues).all()
        columns = [part.column(split, name).tolist() for name in ("sources", "languages")]
        assert columns == [[0] * sizes["documents"]] * 2
    counts = np.bincount(part.array("train", "tokens"), minlength=corpus.vocab_size)
    np.testing.assert_array_equal(corpus.token_counts(), counts)


def test_a_vocabulary_beyond_65536_is_stored_in_four_bytes(tmp_path):
    words = [f"w{number}" for number in range(70_000)]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    (tmp_path / "a.txt").write_text("w69999 w0")
    manifest, _ = run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer=str(tmp_path / "vocab.txt"))
    tokens = Corpus(tmp_path / "out").parts[0].array("train", "tokens")
    assert tokens.tolist() == [70_004, 5]
    assert tokens.dtype == np.uint32
    assert manifest["fields"]["tokens"]["dtype"] == "uint32"


def test_held_out_documents_are_chosen_by_content(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ENOUGH", 0)
    texts = [f"Document {number}." for number in range(2000)]
    held = []
    for name, order in (("a", texts), ("b", texts[::-1] + texts[:50])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(order))
        run(tmp_path / name, f"text:{tmp_path}/{name}.txt", documents="blank-line", heldout=0.1)
        train, held_out = documents(tmp_path / name, "train"), documents(tmp_path / name, "heldout")
        assert len(train) + len(held_out) == len(order)
        held.append({sentence for document in held_out for sentence in document})
        assert not held[-1] & {sentence for document in train for sentence in document}
    assert held[0] == held[1]
    assert 150 < len(held[0]) < 250


def test_a_small_corpus_holds_out_up_to_a_twentieth_of_its_documents(tmp_path, text):
    manifest, _ = run(tmp_path / "a", f"text:{text}", heldout=0.0001)
    assert splits(manifest)["heldout"]["documents"] == 2
    (tmp_path / "1.text").write_text("Text.")
    manifest, printed = run(tmp_path / "c", f"text:{tmp_path}/*.text", heldout=0.01)
    assert splits(manifest)["train"]["documents"] == 1
    assert "nothing is held out" in printed


@pytest.mark.parametrize("undecodable", ["replace", "skip"])
def test_undecodable_documents_are_replaced_or_skipped_and_counted(tmp_path, undecodable):
    (tmp_path / "a.txt").write_bytes(b"Bad \xff bytes.\n\nGood bytes.\n\nBad \xc3")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "Bad \xff bytes."}\n{"text": "Lone \\ud800."}\n{"text": "Good."}')
    spec = (f"text:{tmp_path}/a.txt", f"jsonl:{tmp_path}/b.jsonl")
    manifest, printed = run(tmp_path / "out", *spec, documents="blank-line", undecodable=undecodable)
    problem = {"replace": REPLACED, "skip": SKIPPED}[undecodable]
    assert manifest["counts"] == {problem: {"count": 4, "first": f"{tmp_path}/a.txt"}}
    assert f"4 {problem}" in printed
    found = [sentence for document in documents(tmp_path / "out") for sentence in document]
    assert len(found) == (6 if undecodable == "replace" else 2)
    assert {"Good bytes .", "Good ."} <= set(found)


@pytest.mark.parametrize(("given", "used"), [(1, 1), (2, 2), (None, len(os.sched_getaffinity(0)))])
def test_as_many_processes_run_as_asked_for(tmp_path, text, monkeypatch, given, used):
    seen = []
    pool = making.pool
    monkeypatch.setattr(source, "SHARD", 10_000)
    monkeypatch.setattr(making, "pool", lambda processes: seen.append(processes) or pool(1))
    run(tmp_path / "out", f"text:{text}", processes=given)
    assert seen == [used]


def test_no_text_in_any_document_is_an_error_that_says_what_was_there(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"other": 1}\n{\n')
    with pytest.raises(UserError) as raised:
        run(tmp_path / "out", f"jsonl:{tmp_path}/a.jsonl", tokenizer="wordpiece")
    message = str(raised.value)
    assert "no documents with text" in message
    for part in ("1 empty documents", "1 records without the field", "1 malformed records, first"):
        assert part in message
    (tmp_path / "a.jsonl").write_text('{"text": "Now there is."}\n')
    run(tmp_path / "out", f"jsonl:{tmp_path}/a.jsonl")


def test_a_mistake_is_an_error_that_binds_nothing(tmp_path, text):
    (tmp_path / "file").write_text("")
    (tmp_path / "others" / "train").mkdir(parents=True)
    for out, place, tokenizer, said in (
        ("out", text, "nothing.json", "nothing.json does not exist"),
        ("others", text, "wordpiece", "holds files that are not a corpus; use an empty or a new directory"),
        ("file/out", text, "wordpiece", "--out .*file/out: cannot write there .*choose another directory"),
    ):
        with pytest.raises(UserError, match=said):
            run(tmp_path / out, f"text:{place}", tokenizer=tokenizer)
    assert [path.name for path in (tmp_path / "others").iterdir()] == ["train"]
    run(tmp_path / "out", f"text:{text}")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_is_one_line_and_the_same_command_continues(tmp_path, text, uninterrupted, processes):
    out = tmp_path / "out"
    status, _, errors = start(text, out, processes, most=16_000).wait()
    assert status == 2
    assert re.search(r"^error: --out .*: cannot write there \(File too large\); free space.*\n$", errors), errors
    assert start(text, out).wait()[0] == 0
    assert content(out) == uninterrupted


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_a_document(tmp_path):
    line = " ".join("abcdefghij") + ".\n"
    vocabulary = write_character_vocabulary(tmp_path / "vocab.txt")
    peaks = []  # MB
    for megabytes in (4, 10):
        (tmp_path / "a.txt").write_text(line * (megabytes * 1_000_000 // len(line)))
        given = ["--source", f"text:{tmp_path}/a.txt", "--out", str(tmp_path / f"out-{megabytes}")]
        _, printed, errors = Fork(peak_of_prepare, [*given, "--tokenizer", str(vocabulary)]).wait()
        assert not errors
        peaks.append(int(printed.splitlines()[-1]) / 1e6)
    assert peaks[1] - peaks[0] < 6, peaks
