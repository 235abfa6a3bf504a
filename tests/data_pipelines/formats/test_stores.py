"""Sources in a bucket and on a web server are read where they are."""

import functools
import http.server
import pathlib
import re
import threading

import pytest

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.formats import files, source, table
from data_pipelines.formats.problems import Problems
from tests.data_pipelines.formats.reading import ranges, texts

LINES = "".join(f"Line {number}.\n" for number in range(2000))


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves ranges of files, as web servers and buckets do, and counts the bytes."""

    served = 0

    def do_GET(self):
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        file = pathlib.Path(self.translate_path(self.path))
        if asked is None or not file.is_file():
            super().do_GET()
            return
        first, last = map(int, asked.groups())
        data = file.read_bytes()
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        Handler.served += len(part)
        self.wfile.write(part)

    def do_HEAD(self):
        file = pathlib.Path(self.translate_path(self.path))
        if not file.is_file():
            super().do_HEAD()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(file.stat().st_size))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """The address of a server of the files below tmp_path."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


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


def test_a_bucket_that_is_not_there_or_refuses_is_an_error(storage):
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


def test_a_web_server_is_read(web, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 1000)
    (tmp_path / "a.txt").write_text(LINES)
    assert texts(f"text:{web}/a.txt") == ([LINES], {})
    with pytest.raises(UserError, match=f"--source text:{web}/none.txt does not exist"):
        texts(f"text:{web}/none.txt")


def test_long_files_of_a_web_server_are_cut_at_lines_of_which_little_is_read(web, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "SHARD", 1 << 20)
    monkeypatch.setattr(files, "BLOCK", 1 << 16)
    written = [f"Document {number}. " + "word " * (number % 400) for number in range(6000)]
    (tmp_path / "a.txt").write_text("\n\n".join(written))
    size = (tmp_path / "a.txt").stat().st_size
    one = table.parse(f"text:{web}/a.txt", documents="blank-line")
    monkeypatch.setattr(Handler, "served", 0)
    parts = ranges(one)
    assert len(parts) > 4
    assert Handler.served < 0.2 * size
    read = [document.segments[0].text for part in parts for document in table.read(one, part, Problems())]
    assert read == written
    assert Handler.served < 1.5 * size


def test_files_of_a_store_are_looked_at_together_and_come_in_order():
    together, alone = threading.Barrier(4, timeout=60), threading.get_ident()
    of_store, of_disk = (source.Source("jsonl", place, None) for place in ("gs://bucket/texts", "texts"))
    assert list(files.in_order(lambda number: (number, together.wait() < 4), range(8), of_store)) == [
        (number, True) for number in range(8)
    ]
    assert set(files.in_order(lambda _: threading.get_ident(), range(8), of_disk)) == {alone}
