"""What fails for now is not taken for damage: it is raised as itself, and no text is lost in silence."""

import builtins
import errno
import gzip
import os

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipelines.formats import files, table
from data_pipelines.formats.problems import UNREADABLE, Problems
from tests.data_pipelines.formats.reading import ranges, texts

LINES = "".join(f'{{"text": "good {number}"}}\n' for number in range(3000))


class Failing:
    """A file of which only the first bytes can be read."""

    def __init__(self, file, error, limit):
        self.file, self.error, self.limit = file, error, limit

    def read(self, size=-1):
        if self.file.tell() >= self.limit:
            raise self.error
        return self.file.read(size)

    def __getattr__(self, name):
        return getattr(self.file, name)


def parquet(path):
    noise = [os.urandom(500).hex() for _ in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": noise}), path, row_group_size=500)


MAKE = {
    "text:a.txt": lambda path: path.write_text(LINES),
    "jsonl:a.jsonl": lambda path: path.write_text(LINES),
    "jsonl:a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "jsonl:a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES.encode())),
    "parquet:a.parquet": parquet,
}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), TimeoutError("timed out")])
@pytest.mark.parametrize("spec", MAKE)
def test_a_disk_or_a_network_that_fails_is_no_damage(tmp_path, monkeypatch, spec, error):
    kind, _, name = spec.partition(":")
    MAKE[spec](tmp_path / name)
    one = table.parse(f"{kind}:{tmp_path / name}")
    parts = ranges(one)
    monkeypatch.setattr(files, "BLOCK", 1024)
    opened, limit = open, (tmp_path / name).stat().st_size // 2
    monkeypatch.setattr(builtins, "open", lambda *given: Failing(opened(*given), error, limit))
    problems = Problems()
    with pytest.raises(type(error)) as raised:
        list(table.read(one, parts[0], problems))
    assert raised.value is error
    assert not problems


def test_a_stores_own_error_becomes_an_oserror(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.pipe("/f/a.txt", b"Text.")
    one = table.parse("text:memory://f/a.txt")
    (part,) = ranges(one)

    def fail(*_):
        raise RuntimeError("503 from the store")

    monkeypatch.setattr(type(memory), "open", fail)
    with pytest.raises(OSError, match="RuntimeError: 503 from the store"):
        list(table.read(one, part, Problems()))


@pytest.mark.parametrize("spec", [spec for spec in MAKE if spec.endswith(("gz", "zst", "parquet"))])
def test_damage_is_skipped_and_counted(tmp_path, spec):
    kind, _, name = spec.partition(":")
    MAKE[spec](tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    assert texts(f"{kind}:{tmp_path / name}")[1][UNREADABLE]["count"] == 1


def test_a_zst_file_with_a_long_window_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # size unknown: the window stays
    packed = compressor.compress(b"Some text.") + compressor.flush()
    with pytest.raises(zstandard.ZstdError, match="too much memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    (tmp_path / "a.txt.zst").write_bytes(packed)
    assert texts(f"text:{tmp_path}") == (["Some text."], {})
