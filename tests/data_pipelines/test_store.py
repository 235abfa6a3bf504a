"""Units of work become parts and parts a corpus: documents whole, damage noticed, what differs told apart."""

import itertools
import json
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import EMPTY
from data_pipelines.formats.source import Source
from data_pipelines.manifest import parse_manifest, part_name
from data_pipelines.store.fields import BY_TOKEN, STORED, Field
from data_pipelines.store.files import NpyFile, is_whole, read_summary
from data_pipelines.store.job import Job, check_added, manifest_of, planned
from data_pipelines.store.parts import CUT, TOO_LARGE, choose_held, missing_held, write_part
from data_pipelines.store.units import DOCUMENT, UnitFiles
from tests.data_pipelines.corpora import SPECIAL, numbered, write_corpus

SOURCES = (Source("text", "tests", None),)
JOB = Job(SOURCES, 1000, planned(SOURCES, 1000, BY_TOKEN), heldout=0.0)


def write_unit(folder, documents, job=JOB, continues=False, hashes=None, path="file", **fields):
    """A unit of documents of a file that are lists of sentence lengths; the first may go on from the unit before.
    fields: the values of further ones."""
    begins = np.zeros(len(documents), DOCUMENT)
    begins["start"] = np.cumsum([0, *map(len, documents)])[:-1]
    begins["hash"] = np.arange(len(documents)) if hashes is None else hashes
    begins["continues"][:1] = continues
    lengths = np.array([length for document in documents for length in document], np.int64)
    files = UnitFiles(folder, job)
    files.add(lengths, begins, tokens=np.full(lengths.sum(), 7), **fields)
    files.finish(characters=0, problems={}, paths=[path], values={}, words={})
    return folder


def shapes(folder, split="train"):
    """The sentence lengths of each document of a part."""
    documents, sentences = (np.load(folder / split / f"{name}.npy") for name in ("documents", "sentences"))
    lengths = np.diff(sentences).tolist()
    return [lengths[first:last] for first, last in zip(documents, documents[1:], strict=False)]


def test_an_array_of_several_columns_is_read_as_it_was_written(tmp_path):
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)
    file = NpyFile(tmp_path / "boxes.npy", np.float32, (4,))
    for some in (rows[:2], rows[:0], rows[2:]):
        file.write(some)
    file.close()
    np.testing.assert_array_equal(np.load(tmp_path / "boxes.npy", mmap_mode="r"), rows)


def test_a_document_goes_on_over_units_and_only_its_own_text_joins_it(tmp_path):
    units = [
        write_unit(tmp_path / "a", [[3], [2, 4]]),
        write_unit(tmp_path / "b", [[5]], continues=True),
        write_unit(tmp_path / "c", [[1], []], continues=True),  # the last one's text so far has no tokens
        write_unit(tmp_path / "d", [[6], [], [8]], continues=True),
    ]
    summary = write_part(tmp_path / "part", units, JOB)
    assert shapes(tmp_path / "part") == [[3], [2, 4, 5, 1], [6], [8]]
    assert summary["counts"] == {EMPTY: {"count": 1, "first": "file"}}


def test_a_document_that_goes_on_in_another_part_is_cut_there_and_counted(tmp_path):
    summary = write_part(tmp_path / "part", [write_unit(tmp_path / "a", [[3], [2]], continues=True)], JOB)
    assert shapes(tmp_path / "part") == [[3], [2]]
    assert summary["counts"] == {CUT: {"count": 1, "first": "file"}}


UNIT_FILES = ("tokens.npy", "sentences.npy", "documents.npy", "summary.json")


@pytest.mark.parametrize(("name", "keep"), [*itertools.product(UNIT_FILES, (0, 2)), ("tokens.npy", None)])
def test_a_unit_that_a_power_cut_shortened_or_that_changed_is_not_joined(tmp_path, name, keep):
    unit = write_unit(tmp_path / "a", [[3]])
    assert is_whole(unit)
    content = (unit / name).read_bytes()
    (unit / name).write_bytes(content[:-1] + b"9" if keep is None else content[:keep])
    assert is_whole(unit) == (keep is None)
    with pytest.raises(UserError, match="is damaged: .* start the same command again"):
        write_part(tmp_path / "part", [unit], JOB)
    assert not unit.exists() and not (tmp_path / "part").exists()


def test_a_finished_part_that_lost_bytes_is_an_error_and_not_joined_again(tmp_path):
    write_part(tmp_path / "part", [write_unit(tmp_path / "a", [[3]])], JOB)
    (tmp_path / "part" / "train" / "tokens.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"train/tokens\.npy is not what was written"):
        write_part(tmp_path / "part", [], JOB)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": {"a": 1}}', b"\xff"])
def test_a_damaged_summary_is_one_error_with_its_cure(tmp_path, content):
    write_part(tmp_path / "part", [write_unit(tmp_path / "a", [[3]])], JOB)
    (tmp_path / "part" / "summary.json").write_bytes(content)
    with pytest.raises(UserError, match="summary.json is not what was written; delete .*/part and start"):
        read_summary(tmp_path / "part")


FRACTIONS = (0.0, 0.01, 0.1, 0.5)


@pytest.mark.parametrize("seed", range(40))
def test_never_the_larger_share_is_held_out_and_something_where_that_can_be(tmp_path, seed):
    random = np.random.default_rng(seed)
    fraction, parts = float(random.choice(FRACTIONS)), int(random.integers(1, 4))
    job = Job(SOURCES, 1000, JOB.fields, fraction, parts)
    size = lambda: int(10 ** random.uniform(0, 3.5))
    documents = [[size() for _ in range(random.integers(1, 6))] for _ in range(random.integers(1, 12))]
    hashes = random.integers(0, 2**64, len(documents), np.uint64)
    summary = write_part(tmp_path / "part", [write_unit(tmp_path / "a", documents, job, hashes=hashes)], job)
    train, held = (summary["splits"][split]["tokens"] for split in ("train", "heldout"))
    assert train + held == sum(map(sum, documents)) and train >= held
    if not fraction:
        assert not held
    elif len(documents) > 1 or len(documents[0]) > 1 and 2 * documents[0][-1] <= train + held:
        assert held
    whole = [document for document in shapes(tmp_path / "part", "heldout") if document in documents]
    assert len(whole) >= summary["splits"]["heldout"]["documents"] - 1  # the end of one, at most


def test_of_two_files_the_short_one_and_an_end_of_the_long_one_are_held_out():
    held = choose_held(np.array([9, 3], np.uint64), np.array([2_509, 74_026]), 0.01, 1)
    assert held.tolist() == [True, False]
    assert missing_held(2_509, 76_535, 0.01, 1) == 76_535 // 20 - 2_509


def test_one_long_document_gives_its_end_at_a_sentence(tmp_path):
    job = Job(SOURCES, 1000, JOB.fields, 0.01)
    write_part(tmp_path / "part", [write_unit(tmp_path / "a", [[10] * 1000], job)], job)
    assert [shapes(tmp_path / "part", split) for split in ("heldout", "train")] == [[[10] * 50], [[10] * 950]]


@pytest.mark.parametrize("target", [0, 1])
def test_an_input_and_its_target_stay_together_however_long_they_are(tmp_path, target):
    """The input is in a unit, the target goes on in the next; where both are of one segment, they are text to cut."""
    job = Job(
        SOURCES, 1000, JOB.fields | {"segments": Field("uint8", per="sentence", values=("input", "target"))}, 0.01
    )
    units = [
        write_unit(tmp_path / "a", [[2], [10] * 50], job, segments=np.array([0] * 51)),
        write_unit(tmp_path / "b", [[10] * 50], job, continues=True, segments=np.full(50, target)),
    ]
    summary = write_part(tmp_path / "part", units, job)
    train, held = ([[10] * 100], [[2]]) if target else ([[10] * 95], [[2], [10] * 5])
    assert [shapes(tmp_path / "part", split) for split in ("train", "heldout")] == [train, held]
    assert summary["counts"] == ({TOO_LARGE: {"count": 1, "first": str(SOURCES[0])}} if target else {})


def finished(path, units, job, special=SPECIAL, before=None):
    """A corpus of a part more per call."""
    number = len(before["parts"]) if before else 0
    summary = write_part(path / part_name(number), units, job)
    (path / "tables").mkdir(exist_ok=True)
    np.save(path / "tables" / "word_starts.npy", np.ones(job.vocab_size, bool))
    (path / "tokenizer").mkdir(exist_ok=True)
    (path / "tokenizer" / "vocab.txt").write_text("a b")
    (path / "manifest.json").write_text(json.dumps(manifest_of(path, [summary], job, special, before)))
    return Corpus(path)


def test_parts_that_are_added_make_another_corpus_and_the_one_before_can_be_opened(tmp_path):
    sources = lambda *names: tuple(Source("text", name, None) for name in names)
    job = lambda *names: Job(sources(*names), 1000, planned(sources(*names), 1000, BY_TOKEN), 0.0)
    first = finished(tmp_path / "c", [write_unit(tmp_path / "a", [[3]])], job("x"))
    both = finished(tmp_path / "c", [write_unit(tmp_path / "b", [[4], [5]])], job("z", "x"), before=first.manifest)
    assert both.fingerprint != first.fingerprint and both.size("train")["tokens"] == 12
    assert both.fields["sources"].values == ("text:x", "text:z")
    assert [part.column("train", "sources").tolist() for part in both.parts] == [[0], [1, 1]]
    again = Corpus(tmp_path / "c", first.fingerprint)
    assert again.fingerprint == first.fingerprint and again.size("train")["tokens"] == 3
    again.verify()
    part = pickle.loads(pickle.dumps(again.parts[0]))  # as it goes to a worker
    assert part.lengths("train").tolist() == [3] and len(part.corpus.parts) == 1
    with pytest.raises(UserError, match="and was never 000000000000; give the corpus that the run was started with"):
        Corpus(tmp_path / "c", "0" * 64)


def test_parts_of_another_meaning_are_not_added(tmp_path):
    before = finished(tmp_path / "c", [write_unit(tmp_path / "a", [[3]])], JOB).manifest
    check_added(before, JOB.fields)
    with pytest.raises(UserError, match="--append: .* other fields than the corpus .word_starts differ."):
        check_added(before, planned(SOURCES, 1000, STORED))
    with pytest.raises(UserError, match="--append: .* other fields than .* .labels only in these sources."):
        check_added(before, JOB.fields | {"labels": Field("uint16")})


def change_manifest(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda manifest: manifest["special"].update(mask=5), "what the manifest says of the tokens has changed"),
        (lambda manifest: manifest["parts"].pop(), "what the manifest says of the tokens has changed"),
        (lambda manifest: manifest["parts"][1]["values"].update(languages=["zh"]), "the summary of parts/000001 has"),
    ],
)
def test_verify_notices_a_manifest_that_says_something_else(tmp_path, change, said):
    path = write_corpus(tmp_path / "c", numbered([[3], [4]]), parts=2)
    Corpus(path).verify()
    change_manifest(path, change)
    with pytest.raises(UserError, match=said):
        Corpus(path).verify()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux")
def test_planning_keeps_no_file_of_a_part_open_and_reading_one(tmp_path):
    part = Corpus(write_corpus(tmp_path / "c", numbered([[3], [4]]))).parts[0]
    open_files = lambda: Path("/proc/self/maps").read_text().count(str(tmp_path))
    part.lengths("train"), part.sentences("train"), part.documents("train"), part.column("train", "sources")
    assert open_files() == 0
    part.read("train", "tokens", np.array([0]), 2)
    assert open_files() == 1


def test_a_corpus_of_many_parts_may_have_their_files_open(tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "c", numbered([[3]] * 3), parts=3)
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1030))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    Corpus(path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 8192))
    Corpus(path)
    assert set_to == [(1030, 1030)]


def test_corpora_of_the_same_arrays_and_another_meaning_have_other_fingerprints(tmp_path):
    path = write_corpus(tmp_path / "c", numbered([[3]]))
    manifest = json.loads((path / "manifest.json").read_text())
    job = Job(SOURCES, 100, planned(SOURCES, 100, BY_TOKEN))
    prints = {manifest["fingerprint"]}
    again = lambda **changes: manifest_of(path, manifest["parts"], *(changes | {}).values())["fingerprint"]
    prints.add(again(job=job, special=SPECIAL | {"mask": 5}))
    prints.add(again(job=Job(SOURCES, 100, planned(SOURCES, 100, STORED)), special=SPECIAL))
    prints.add(again(job=Job(SOURCES, 101, planned(SOURCES, 100, BY_TOKEN)), special=SPECIAL))
    (path / "tokenizer" / "vocab.txt").write_text("other")
    prints.add(again(job=job, special=SPECIAL))
    np.save(path / "tables" / "word_starts.npy", np.ones(100, bool))
    prints.add(again(job=job, special=SPECIAL))
    assert len(prints) == 6


ODD = ["../secret", "/etc/passwd", "train/../../x", "train//x", "a\nb", "", ".ssh/id", "a\\b"]


@pytest.mark.parametrize("where", ["files", "tokenizer", "fields", "fingerprint"])
def test_names_of_a_manifest_that_lead_elsewhere_are_refused(tmp_path, where):
    path = write_corpus(tmp_path / "c", numbered([[3]]))
    for name in ODD:
        manifest = json.loads((path / "manifest.json").read_text())
        if where == "files":
            manifest["parts"][0]["files"][name] = {"bytes": 1, "sha256": "0" * 64}
        elif where == "fingerprint":
            manifest["fingerprint"] = name
        else:
            manifest[where][name] = manifest["fields"]["tokens"]
        with pytest.raises(UserError, match="corpus here: manifest.json: .*rerun prepare"):
            parse_manifest("here", json.dumps(manifest).encode())
