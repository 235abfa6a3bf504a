"""The same text gives the same documents and the same corpus, whatever the format and wherever it is cut."""

import gzip
import json
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.document import Document, Segment
from data_pipelines.errors import UserError
from data_pipelines.formats import cutting, source, table
from data_pipelines.formats.cutting import pieces
from data_pipelines.formats.problems import EMPTY, UNREADABLE
from tests.data_pipelines.formats.reading import ranges, read, texts

CHUNKS = ["a", "b ", "é" * 21, "中" * 33, "😀" * 9, "\n", "\t", "word word ", "x" * 31, "y" * 70, "line\n"]
LETTERS = st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=40).map("".join)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cutting, "WINDOW", 32)
    monkeypatch.setattr(source, "SHARD", 128)


def write(folder: Path, texts: list[str]) -> list[tuple[str, dict]]:
    """The texts in each format."""
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text.encode())
        (folder / f"{number:03}.txt.gz").write_bytes(gzip.compress(text.encode()))
    records = [{"text": text, "n": 1} for text in texts]
    for name, ascii_ in (("a.jsonl", True), ("b.jsonl", False)):
        lines = [json.dumps(record, ensure_ascii=ascii_) + "\n" for record in records]
        (folder / name).write_text("".join(lines), "utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"n": [0] * len(texts), "text": texts}), folder / "a.parquet")
    names = "text:*.txt", "text:*.txt.gz", "jsonl:a.jsonl", "jsonl:b.jsonl", "parquet:a.parquet"
    return [name.replace(":", f":{folder}/") for name in names]


@settings(max_examples=30)
@given(st.lists(LETTERS, min_size=1, max_size=4))
def test_text_jsonl_and_parquet_of_the_same_documents_are_the_same(small, texts):
    with tempfile.TemporaryDirectory() as folder:
        found = [read(spec) for spec in write(Path(folder), texts)]
    for documents, problems in found:
        assert documents == found[0][0]
        assert not problems
    joined = "".join(("|" if not one.continues else "") + one.segments[0].text for one in found[0][0])
    assert joined == "".join(f"|{text}" for text in texts)
    assert all(len(one.segments[0].text.encode()) <= 64 for one in found[0][0])


@settings(max_examples=40)
@given(LETTERS, st.integers(1, 50))
def test_pieces_depend_neither_on_blocks_nor_on_where_the_reader_began(text, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "WINDOW", 16)
        data = text.encode()
        whole = list(pieces([data]))
        assert list(pieces(data[at : at + block] for at in range(0, len(data), block))) == whole
        start = 0
        for index, piece in enumerate(whole):
            assert next(pieces([data[start:]], start)) == whole[index]
            assert piece.decode()  # whole characters
            start += len(piece)


def test_a_piece_ends_with_a_line_else_a_space_else_a_character(small):
    assert list(pieces([b"one two\nthree " + b"x" * 40])) == [b"one two\n", b"three " + b"x" * 40]
    assert list(pieces([b"one two " + b"x" * 40])) == [b"one two ", b"x" * 40]
    assert next(pieces([b"a" + "é".encode() * 20])).decode() == "a" + "é" * 15


def test_several_fields_are_segments_in_every_format_of_records(tmp_path):
    records = [{"question": "Who?", "context": f"It was {name}.", "id": 1} for name in ("Ann", "Bob")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    for kind in ("jsonl", "parquet"):
        documents, problems = read(f"{kind}:{tmp_path}/a.{kind}", fields=("context", "question"))
        assert [one.segments for one in documents] == [
            (Segment("context", "It was Ann."), Segment("question", "Who?")),
            (Segment("context", "It was Bob."), Segment("question", "Who?")),
        ]
        assert not problems


def test_long_segments_come_in_pieces_of_one_document(small, tmp_path):
    long = {"question": "é" * 100, "context": "word " * 50}
    (tmp_path / "a.jsonl").write_text(json.dumps(long) + "\n" + json.dumps({"question": "q", "context": "c"}))
    documents, _ = read(f"jsonl:{tmp_path}/a.jsonl", fields=("question", "context"))
    assert documents[-1] == Document((Segment("question", "q"), Segment("context", "c")))
    pieces_of_it = [segment for one in documents[:-1] for segment in one.segments]
    assert [one.continues for one in documents[:-1]] == [False] + [True] * (len(documents) - 2)
    assert max(len(text.encode()) for _, text, _ in pieces_of_it) <= 64
    for name, text in long.items():
        assert "".join(found for segment, found, _ in pieces_of_it if segment == name) == text
    names = [segment.name for segment in pieces_of_it]
    assert names == sorted(names, reverse=True)


ROWS = [f"Text {number}. " + "word " * number for number in range(60)]


def save(folder, texts, files=2, rows=5, kind=None):
    """As save_to_disk does: state.json, dataset_info.json and streams of batches of rows."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{files:05}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        part = texts[len(texts) * number // files : len(texts) * (number + 1) // files]
        table = pyarrow.table({"id": list(range(len(part))), "text": pyarrow.array(part, kind or pyarrow.string())})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("shard", [1, 3000, 1 << 20])
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_a_row_is_a_document(tmp_path, monkeypatch, kind, shard):
    monkeypatch.setattr(source, "SHARD", shard)
    save(tmp_path / "set", [*ROWS, None], kind=kind)
    found, problems = texts(f"arrow:{tmp_path}/set")
    assert found == ROWS
    assert list(problems) == [EMPTY]
    parts = ranges(table.parse(f"arrow:{tmp_path}/set/"))
    assert len(parts) == {1: 13, 1 << 20: 2}.get(shard, len(parts))
    assert all(part.version for part in parts)


def test_a_folder_of_splits_or_of_something_else_is_an_error(tmp_path):
    save(tmp_path / "sets" / "train", ROWS)
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="holds the splits train, test; name one, as in arrow:.*sets/train"):
        read(f"arrow:{tmp_path}/sets")
    with pytest.raises(UserError, match="has no state.json; give a folder that a data set's save_to_disk wrote"):
        read(f"arrow:{tmp_path}")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
def test_a_file_that_is_cut_short_is_counted_and_gives_what_is_whole(tmp_path, share):
    save(tmp_path / "set", ROWS)
    file = sorted((tmp_path / "set").glob("*.arrow"))[0]
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    found, problems = texts(f"arrow:{tmp_path}/set")
    assert found[-30:] == ROWS[30:]
    assert found[:-30] == ROWS[: len(found) - 30]
    assert len(found) > 35 or share < 0.9
    assert problems[UNREADABLE]["count"] == 1
