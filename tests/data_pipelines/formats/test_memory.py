"""A record takes memory and time in proportion to its length, in every format, and a row group a part of its own."""

import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from tests.data_pipelines.prepare.forks import Fork, peak_of_reading

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
LINE = 'word and "word".\n'
SIZE = 12_000_000


def peak(spec: str, documents: str = "file") -> float:
    """Bytes of memory while the source is read."""
    _, printed, errors = Fork(peak_of_reading, spec, documents).wait()
    assert not errors
    size, memory = map(int, printed.split())
    assert size > SIZE * 0.9
    return memory


def test_a_long_record_takes_a_few_bytes_a_byte(tmp_path):
    text = LINE * (SIZE // len(LINE))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "wiki").write_text(f"<doc >\n{text}</doc>\n")
    specs = "jsonl:a.jsonl", "parquet:a.parquet", "wikiextractor:wiki", "text:a.txt"
    for kind, name in (spec.split(":") for spec in specs):
        documents = "blank-line" if kind == "text" else "file"
        assert peak(f"{kind}:{tmp_path}/{name}", documents) < 8 * SIZE, kind


def test_memory_does_not_grow_with_a_text_file_or_a_row_group(tmp_path):
    (tmp_path / "a.txt").write_text(LINE * (2 * SIZE // len(LINE)))
    assert peak(f"text:{tmp_path}/a.txt") < SIZE
    rows = pyarrow.table({"text": [LINE * 250] * (6 * SIZE // len(LINE) // 250)})
    for compression in ("none", "zstd"):
        file = tmp_path / f"{compression}.parquet"
        pyarrow.parquet.write_table(rows, file, compression=compression, use_dictionary=False)
        assert peak(f"parquet:{file}") < 3.4 * SIZE, compression
