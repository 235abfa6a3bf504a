"""Sources in a bucket and on a web server are read where they are."""

import functools
import http.server
import threading

import pytest

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.formats import files, source, table
from data_pipelines.formats.problems import Problems
from tests.data_pipelines.formats.reading import ranges, texts

LINES = "".join(f"Line {number}.\n" for number in range(2000))


@pytest.fixture
def web(tmp_path):
    """The address of a server of the files below tmp_path."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
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
