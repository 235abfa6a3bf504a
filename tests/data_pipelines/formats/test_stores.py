"""Sources in a bucket and on a web server are read where they are."""

import io
import json
import threading

import pyarrow
import pytest

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.formats import files, source, table
from data_pipelines.formats.problems import Problems
from tests.data_pipelines.formats.reading import ranges, texts

LINES = "".join(f"Line {number}.\n" for number in range(2000))


def test_a_bucket_is_read_and_an_edit_is_another_version(storage, monkeypatch):
    monkeypatch.setattr(source, "SHARD", 5000)
    storage.put("bucket", "in/a.txt", LINES.encode())
    storage.put("bucket", "in/sub/b.txt", b"Text.")
    assert texts("text:gs://bucket/in") == ([LINES, "Text."], {})
    assert texts("text:gs://bucket/in/*/*.txt") == (["Text."], {})
    one = table.parse("text:gs://bucket/in/sub")
    (part,) = ranges(one)
    assert table.changed(part) is None
    storage.put("bucket", "in/sub/b.txt", b"Tent.")
    assert table.changed(part) == part.path
    assert ranges(one) != [part]
    with pytest.raises(UserError, match="--source text:gs://bucket/none does not exist"):
        texts("text:gs://bucket/none")
    storage.refuse = 403, "no rights"
    with pytest.raises(UserError, match="--source text:gs://bucket/in: no access .*no rights"):
        texts("text:gs://bucket/in")


def test_a_bucket_that_fails_for_now_is_read_later_and_never_taken_for_damage(storage, monkeypatch):
    storage.put("bucket", "a.txt", b"Text.")
    one = table.parse("text:gs://bucket/a.txt")
    (part,) = ranges(one)
    monkeypatch.setattr(cloud, "PAUSES", (0, 0))
    storage.refuse, problems = (403, "no rights"), Problems()
    with pytest.raises(OSError, match="no rights"):
        list(table.read(one, part, problems))
    assert not problems
    monkeypatch.setattr(cloud.time, "sleep", lambda _: setattr(storage, "refuse", None))
    monkeypatch.setattr(cloud, "may_pass", lambda error: True)
    storage.refuse = 403, "no rights"
    assert [document.segments[0].text for document in table.read(one, part, problems)] == ["Text."]


def test_long_files_of_a_web_server_are_cut_at_lines_of_which_little_is_read(storage, monkeypatch):
    monkeypatch.setattr(source, "SHARD", 1 << 20)
    monkeypatch.setattr(files, "BLOCK", 1 << 16)
    written = [f"Document {number}. " + "word " * (number % 400) for number in range(8000)]
    content = "\n\n".join(written).encode()
    storage.put("bucket", "a.txt", content)
    web = f"text:{storage.url}/download/storage/v1/b/bucket/o"
    one = table.parse(f"{web}/a.txt?alt=media", documents="blank-line")
    parts = ranges(one)
    assert len(parts) > 4
    assert storage.served < 0.2 * len(content)
    read = [document.segments[0].text for part in parts for document in table.read(one, part, Problems())]
    assert read == written
    assert storage.served < 1.5 * len(content)
    with pytest.raises(UserError, match="--source text:http://.*none.txt?.* does not exist"):
        ranges(table.parse(f"{web}/none.txt?alt=media"))


def test_a_long_arrow_file_of_a_store_is_cut_between_batches_whose_bodies_are_not_read(storage, monkeypatch):
    monkeypatch.setattr(source, "SHARD", 1 << 20)
    written = [f"Text {number}. " + "word " * 2000 for number in range(1000)]
    rows, content = pyarrow.table({"text": written}), io.BytesIO()
    with pyarrow.ipc.new_stream(content, rows.schema) as stream:
        stream.write_table(rows, max_chunksize=50)
    one = table.parse("arrow:gs://bucket/set")
    storage.put("bucket", "set/a.arrow", content.getvalue())
    storage.put("bucket", "set/state.json", json.dumps({"_data_files": [{"filename": "a.arrow"}]}).encode())
    parts = ranges(one)
    assert len(parts) == 7 and storage.served < 0.01 * len(content.getvalue())
    read = [document.segments[0].text for part in parts for document in table.read(one, part, Problems())]
    assert read == written


def test_files_of_a_store_are_looked_at_together_and_come_in_order():
    together, alone = threading.Barrier(4, timeout=60), threading.get_ident()
    of_store, of_disk = (source.Source("jsonl", place, None) for place in ("gs://bucket/texts", "texts"))
    assert list(files.each(range(8), lambda _, number: [(number, together.wait() < 4)], of_store)) == [
        (number, True) for number in range(8)
    ]
    assert set(files.each(range(8), lambda *_: [threading.get_ident()], of_disk)) == {alone}
