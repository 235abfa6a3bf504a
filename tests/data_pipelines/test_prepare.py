"""A corpus holds its documents, is split by hash, and does not depend on processes or interruptions."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.formats import source
from data_pipelines.formats.problems import PLAIN_SPACES, REPLACED, SKIPPED
from data_pipelines.prepare import parts as making
from data_pipelines.store import heldout, parts
from tests.data_pipelines.prepared import content, documents, run, splits

# A run in another process, with small shards, that may kill itself at the n-th call of a function
PROGRAM = """
import os, sys
from data_pipelines.tokenizers import stored as tokenizers
from data_pipelines.prepare import ending, partial
from data_pipelines.prepare import parts as making
from data_pipelines.store import finish, parts, units
from data_pipelines.formats import source
from data_pipelines.__main__ import main

def dying(function, calls=[]):
    def call(*arguments, **keywords):
        calls.append(1)
        if len(calls) == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
        return function(*arguments, **keywords)
    return call

if __name__ == "__main__":
    source.SHARD = 20_000
    if sys.argv[1]:
        module, name = sys.argv[1].split(".")
        setattr(globals()[module], name, dying(getattr(globals()[module], name)))
    sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of 60 files, 200 kB."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    words = ["alpha", "beta", "Gamma", "delta,", "epsilon's", "zeta.", "Eta!"]
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"Document {number}. " + " ".join(random.choice(words, 600)))
    return folder


def command(text, out, processes=1):
    return ["prepare", "--source", f"text:{text}", "--vocab-size", "200", "--out", str(out), f"--processes={processes}"]


def start(arguments, kill="", call=0, before=""):
    arguments = [sys.executable, "-c", before + PROGRAM, kill, str(call), *arguments]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    process = start(command(text, out))
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert not errors
    return content(out)


KILLS = [
    ("tokenizers.save", 1),
    ("partial.put_new", 1),  # before the plan is there
    ("partial.put_new", 2),  # before the state is
    ("making.write_unit", 1),
    ("making.write_unit", 7),
    ("parts.read_unit", 9),  # while counting held-out documents
    ("parts.read_unit", 20),  # while joining
    ("parts.describe_files", 1),
    ("parts.put", 1),
    ("partial.put", 2),  # the part's place
    ("partial.put", 3),  # the tokenizer's
    ("ending.write_tables", 1),
    ("finish.fingerprint", 1),
    ("ending.write_json", 1),  # everything is in place but the manifest
]


@pytest.mark.parametrize(("function", "call"), KILLS)
def test_killed_anywhere_and_run_again_the_bytes_are_the_same(tmp_path, text, uninterrupted, function, call):
    out = tmp_path / "out"
    process = start(command(text, out), function, call)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    units, joined = len(list(out.glob(".partial/units/*/unit-??????"))), (out / "parts" / "000000").exists()
    process = start(command(text, out))
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert (f"continuing: 0 parts are there, and {units} of" in printed) == (units > 0 and not joined)
    assert content(out) == uninterrupted
    assert not (out / ".partial").exists()


def test_units_that_a_power_cut_shortened_are_made_again(tmp_path, text, uninterrupted):
    out = tmp_path / "out"
    start(command(text, out), "parts.read_unit", 1).communicate()
    units = sorted(out.glob(".partial/units/*/unit-??????"))
    for unit, name in zip(units, ("tokens.bin", "documents.bin", "sentences.bin", "summary.json"), strict=False):
        file = unit / name
        file.write_bytes(file.read_bytes()[: -1 - file.stat().st_size // 2])
    process = start(command(text, out))
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert f"and {len(units) - 4} of {len(units)} units" in printed
    assert content(out) == uninterrupted


def test_two_processes_killed_twice_give_the_same_bytes_and_leave_no_process(tmp_path, text, uninterrupted):
    out = tmp_path / "out"
    for wanted in (2, 5):
        process = start(command(text, out, processes=2))
        while process.poll() is None and len(list(out.glob(".partial/units/*/unit-??????"))) < wanted:
            time.sleep(0.002)
        process.kill()
        process.communicate()  # the pipes close when the workers have ended too
    process = start(command(text, out, processes=2))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert content(out) == uninterrupted


def test_a_finished_corpus_is_left_alone_and_other_settings_are_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("Some text.")
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
    assert "files of its sources that are not in it: 1; add them with --append" in printed
    assert content(tmp_path / "out") == before
    with mock.patch("data_pipelines.prepare.command.table.plan", side_effect=OSError(errno.EIO, "failed")):
        assert "already finished; nothing to do" in run(tmp_path / "out", f"text:{texts}/*.txt")[1]


@pytest.mark.parametrize(
    "option, value", [("heldout", float("nan")), ("heldout", -1), ("processes", 0), ("vocab_size", 10**12)]
)
def test_a_number_out_of_range_is_refused_by_name_before_anything_is_made(option, value, tmp_path):
    (tmp_path / "a.txt").write_text("Some text.")
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')} {value}: (give|use) a"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt", **{option: value})
    assert not (tmp_path / "out").exists()


def test_an_unfinished_corpus_of_other_settings_or_changed_sources_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("Some text.")
    monkeypatch.setattr(making, "write_part", None)
    with pytest.raises(TypeError):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt")
    with pytest.raises(UserError, match="heldout was 0.0 and is 0.5"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt", heldout=0.5)
    (tmp_path / "a.txt").write_text("Some other text.")
    with pytest.raises(UserError, match="its sources have changed"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt")


def test_two_runs_do_not_write_to_the_same_corpus_at_once(tmp_path, text):
    (tmp_path / "out" / ".partial").mkdir(parents=True)
    with open(tmp_path / "out" / ".partial" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another prepare is writing there"):
            run(tmp_path / "out", f"text:{text}")


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
    assert manifest["sources"] == [{"source": f"text:{text}", "files": 60, "bytes": manifest["sources"][0]["bytes"]}]
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
    monkeypatch.setattr(heldout, "ENOUGH", 0)
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
    assert splits(manifest)["heldout"]["documents"] == 3
    manifest, _ = run(tmp_path / "b", f"text:{text}")
    assert splits(manifest)["heldout"]["documents"] == 0
    (tmp_path / "1.text").write_text("Text.")
    manifest, printed = run(tmp_path / "c", f"text:{tmp_path}/*.text", heldout=0.01)
    assert splits(manifest)["train"]["documents"] == 1
    assert "nothing could be held out" in printed
    (tmp_path / "2.text").write_text("More text.")
    manifest, _ = run(tmp_path / "d", f"text:{tmp_path}/*.text", heldout=0.01)
    assert splits(manifest)["heldout"]["documents"] == splits(manifest)["train"]["documents"] == 1


def test_documents_that_are_all_the_same_are_all_trained_on(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.text").write_text("The same.")
    manifest, _ = run(tmp_path / "out", f"text:{tmp_path}/*.text", heldout=0.01)
    assert [splits(manifest)[split]["documents"] for split in ("train", "heldout")] == [2, 0]


def test_documents_that_cross_shards_stay_whole_in_either_split(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "SHARD", 300)
    texts = {f"{number}.txt": "".join(f"Line {line} of {number}.\n" for line in range(99)) for number in range(6)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    run(tmp_path / "out", f"text:{tmp_path}/?.txt", heldout=0.5)
    found = documents(tmp_path / "out", "train") + documents(tmp_path / "out", "heldout")
    expected = [[f"Line {line} of {number} ." for line in range(99)] for number in range(6)]
    assert sorted(found) == expected
    assert documents(tmp_path / "out", "heldout")
    assert documents(tmp_path / "out", "train")


def test_fingerprint_depends_on_content_alone(tmp_path, text):
    prints = {}
    for name, options in (("a", {}), ("b", {}), ("c", {"heldout": 0.3}), ("d", {"cased": False})):
        prints[name] = run(tmp_path / name, f"text:{text}", **options)[0]["fingerprint"]
    assert prints["a"] == prints["b"]
    assert len(set(prints.values())) == 3


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


def test_the_language_splits_sentences(tmp_path):
    (tmp_path / "a.text").write_text("Am 3. Mai kam er. Ja.")
    found = []
    for language in ("de", "en"):
        run(tmp_path / language, f"text:{tmp_path}/a.text", language=(language,))
        found.append(documents(tmp_path / language))
    assert found == [[["Am 3 . Mai kam er .", "Ja ."]], [["Am 3 .", "Mai kam er .", "Ja ."]]]


def test_the_vocabulary_size_is_kept_to(tmp_path):
    (tmp_path / "a.text").write_text(" ".join(f"number{number} word{number * 7}" for number in range(500)))
    for size in (70, 90):
        manifest, _ = run(tmp_path / f"{size}", f"text:{tmp_path}/a.text", tokenizer="wordpiece", vocab_size=size)
        assert manifest["vocab_size"] == size


@pytest.mark.parametrize(("given", "used"), [(1, 1), (2, 2), (None, len(os.sched_getaffinity(0)))])
def test_as_many_processes_run_as_asked_for(tmp_path, text, monkeypatch, given, used):
    seen = []
    pool = making.pool
    monkeypatch.setattr(source, "SHARD", 10_000)
    monkeypatch.setattr(making, "pool", lambda processes: seen.append(processes) or pool(1))
    run(tmp_path / "out", f"text:{text}", processes=given)
    assert seen == [used]


def test_options_out_of_range_are_errors(tmp_path, text):
    for option, value, said in [("heldout", 0.9, "--heldout 0.9"), ("processes", 0, "--processes 0")]:
        with pytest.raises(UserError, match=said):
            run(tmp_path / "out", f"text:{text}", **{option: value})
    with pytest.raises(UserError, match="--source is missing"):
        run(tmp_path / "out")


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


def test_a_directory_with_other_files_is_left_alone(tmp_path, text):
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="holds files that are no corpus; use an empty or a new directory"):
        run(tmp_path, f"text:{text}", tokenizer="wordpiece")
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_a_mistake_in_the_settings_binds_nothing(tmp_path, text):
    with pytest.raises(UserError, match="does not exist"):
        run(tmp_path / "out", f"text:{tmp_path}/nothing")
    with pytest.raises(UserError, match="nothing.json does not exist"):
        run(tmp_path / "out", f"text:{text}", tokenizer="nothing.json")
    run(tmp_path / "out", f"text:{text}")


def test_a_place_that_cannot_be_written_is_an_error(tmp_path, text):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out .*file/out: cannot write there .*choose another directory"):
        run(tmp_path / "file" / "out", f"text:{text}", tokenizer="wordpiece")


# A file may not grow beyond this: writing fails as on a full disk. Python ignores the signal that would come, too.
FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_is_one_line_and_the_same_command_continues(tmp_path, text, uninterrupted, processes):
    out = tmp_path / "out"
    process = start(command(text, out, processes), before=FULL)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors.count("\n") == 1, errors
    assert re.search(r"^error: --out .*: cannot write there \(File too large\); free space", errors)
    process = start(command(text, out, processes))
    process.communicate()
    assert content(out) == uninterrupted


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_a_document(tmp_path):
    words = [f"word{number}" for number in range(100)]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]))
    line = " ".join(words) + ".\n"
    program = (
        "import sys\nfrom data_pipelines.__main__ import main\n"
        "main(sys.argv[1:])\nprint(open('/proc/self/status').read())"
    )
    peaks = []  # MiB
    for megabytes in (10, 40):
        (tmp_path / "a.txt").write_text(line * (megabytes * 1_000_000 // len(line)))
        arguments = ["prepare", "--source", f"text:{tmp_path}/a.txt", "--out", str(tmp_path / f"out-{megabytes}")]
        arguments += ["--tokenizer", str(tmp_path / "vocab.txt"), "--processes", "1"]
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        peaks.append(int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) / 1024)
    assert peaks[1] - peaks[0] < 30, peaks


def test_a_space_at_which_the_sentence_splitter_panics_costs_no_text_and_is_counted(tmp_path):
    (tmp_path / "a.txt").write_text("B\u00a0. It helps", "utf-8")
    manifest, _ = run(tmp_path / "out", f"text:{tmp_path}/a.txt")
    assert documents(tmp_path / "out") == [["B .", "It helps"]]
    assert manifest["counts"][PLAIN_SPACES]["count"] == 1
