"""A record takes memory and time in proportion to its length, in every format, and a row group a part of its own."""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from tests.data_pipelines.prepared import write_character_vocabulary

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
LINE = 'word and "word".\n'
PROGRAM = """
import sys
from data_pipelines.formats import table
from data_pipelines.formats.problems import Problems

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

one = table.parse(sys.argv[1], documents=sys.argv[2])
parts = [part for unit in table.plan([one], Problems()) for part in unit]
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
size = sum(len(document.segments[0].text.encode()) for part in parts for document in table.read(one, part, Problems()))
print(size, status("VmHWM") - before)
"""
PREPARE = """
import sys
from data_pipelines.__main__ import main
main(["prepare", "--processes", "1", *sys.argv[1:]])
print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
SIZE = 24_000_000


def peak(spec: str, documents: str = "file") -> float:
    """Bytes of memory while the source is read."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, spec, documents], capture_output=True, text=True, check=True)
    size, memory = map(int, done.stdout.split())
    assert size > SIZE * 0.9
    return memory


def test_a_long_record_takes_a_few_bytes_a_byte(tmp_path):
    text = LINE * (SIZE // len(LINE))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "wiki").write_text(f"<doc >\n{text}</doc>\n")
    specs = {f"jsonl:{tmp_path}/a.jsonl": "", f"parquet:{tmp_path}/a.parquet": "", f"wikiextractor:{tmp_path}/wiki": ""}
    for spec, documents in (specs | {f"text:{tmp_path}/a.txt": "blank-line"}).items():
        assert peak(spec, documents) < 8 * SIZE, spec


def test_memory_does_not_grow_with_a_text_file_or_a_row_group(tmp_path):
    (tmp_path / "a.txt").write_text(LINE * (SIZE // len(LINE)))
    assert peak(f"text:{tmp_path}/a.txt") < SIZE / 2
    rows = pyarrow.table({"text": [LINE * 250] * (3 * SIZE // len(LINE) // 250)})
    for compression in ("none", "zstd"):
        file = tmp_path / f"{compression}.parquet"
        pyarrow.parquet.write_table(rows, file, compression=compression, use_dictionary=False)
        assert peak(f"parquet:{file}") < 1.7 * SIZE, compression


def test_a_long_line_of_json_is_prepared_in_a_few_bytes_a_byte(tmp_path):
    peaks = []
    for size in (SIZE // 24, SIZE // 2):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": LINE.replace("\n", " ") * (size // len(LINE))}))
        arguments = ["--source", f"jsonl:{tmp_path}/a.jsonl", "--out", str(tmp_path / f"out-{size}"), "--tokenizer"]
        arguments.append(str(write_character_vocabulary(tmp_path / "vocab.txt")))
        done = subprocess.run([sys.executable, "-c", PREPARE, *arguments], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert peaks[1] - peaks[0] < 8 * SIZE // 2
