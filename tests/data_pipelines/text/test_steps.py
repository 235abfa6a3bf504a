"""Steps make documents of documents: they drop and split them, whole or in pieces; what is dropped is counted."""

import json

import pytest

from data_pipelines.document import plain
from data_pipelines.formats import cutting, source
from data_pipelines.formats.problems import Problems
from data_pipelines.text.steps import SHORT, SHORTEST, STEPS, Step
from data_pipelines.text.steps import run as run_steps
from tests.data_pipelines.prepared import documents, run


def without_marked(given, drop):
    """Documents that begin with ! go, with all their pieces."""
    dropped = False
    for document in given:
        if not document.continues:
            dropped = document.segments[0].text.startswith("!")
            if dropped:
                drop("marked ones left out")
        if not dropped:
            yield document


def at_bars(given, drop):
    """Each | begins a document."""
    for document in given:
        first, *others = document.segments[0].text.split("|")
        yield plain(first, document.continues)
        yield from map(plain, others)


@pytest.fixture
def probes(monkeypatch):
    monkeypatch.setitem(STEPS, "marked", Step(1, without_marked))
    monkeypatch.setitem(STEPS, "bars", Step(1, at_bars))


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return f"jsonl:{path}"


@pytest.mark.parametrize("window", [32, 1 << 19])
def test_what_is_dropped_goes_with_all_its_pieces_and_what_is_split_is_whole(tmp_path, monkeypatch, probes, window):
    monkeypatch.setattr(cutting, "WINDOW", window)
    long = "word " * 40
    of_texts = ["a b", f"!{long}", "c", f"d {long}|e {long}|f", "!g", "h"]
    given = write(tmp_path / "a.jsonl", of_texts)
    manifest, printed = run(tmp_path / "out", given, steps=("marked", "bars"))
    found = [" ".join(document) for document in documents(tmp_path / "out")]
    assert found == ["a b", "c", f"d {long.strip()}", f"e {long.strip()}", "f", "h"]
    assert manifest["counts"] == {"marked ones left out": {"count": 2, "first": f"{tmp_path}/a.jsonl"}}
    assert [*map(tuple, manifest["steps"])] == [("marked", 1), ("bars", 1)]
    assert "2 marked ones left out; the first: " in printed


def test_short_documents_are_counted_over_units_and_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "SHARD", 500)
    texts = ["x" * (SHORTEST - number % 2) for number in range(40)]
    given = write(tmp_path / "a.jsonl", texts)
    manifest, printed = run(tmp_path / "out", given, steps=("short",), processes=2)
    assert manifest["counts"] == {SHORT: {"count": 20, "first": f"{tmp_path}/a.jsonl"}}
    assert sum(part["splits"]["train"]["documents"] for part in manifest["parts"]) == 20
    assert f"20 {SHORT}" in printed


def test_a_long_document_may_begin_with_a_short_piece_or_in_another_range():
    pieces = [
        plain("rest of one in another range", continues=True),
        plain("short"),
        plain("a", continues=True),
        plain("long"),
        plain("b" * SHORTEST, continues=True),
        plain("c", continues=True),
        plain("short"),
    ]
    problems = Problems()
    kept = list(run_steps(["short"], pieces, lambda reason: problems.note(reason, "here")))
    assert kept == [pieces[0], *pieces[3:6]]
    assert problems[SHORT]["count"] == 2
