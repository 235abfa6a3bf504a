"""Malformed input never loses a sound document; what fails for now is raised as itself and not taken for damage."""

import builtins
import bz2
import errno
import gzip
import json
import lzma
import os
import random
import tempfile
import zlib
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.errors import UserError
from data_pipelines.formats import cutting, files, table
from data_pipelines.formats.problems import MALFORMED, UNREADABLE, Problems
from tests.data_pipelines.formats.reading import ranges, texts
from tests.data_pipelines.prepared import documents, run, splits

# suffix -> compress, and as much as can be had back from the front of a damaged file
CODECS = {
    "": (bytes, bytes),
    ".gz": (gzip.compress, lambda data: zlib.decompressobj(31).decompress(data)),
    ".bz2": (lambda data: bz2.compress(data, 1), lambda data: bz2.BZ2Decompressor().decompress(data)),
    ".xz": (lzma.compress, lambda data: lzma.LZMADecompressor().decompress(data)),
    ".zst": (zstandard.compress, lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)),
}
JUNK = st.binary(max_size=40).map(lambda data: data.replace(b"\n", b""))
WEIRD = st.text(max_size=20).map(lambda text: json.dumps({"text": text}).encode())
BAD = {
    "text": JUNK,
    "wikiextractor": st.sampled_from([b"</doc>", b"<doc id=", b"<doc >\nno end", b"<doc >\n\xff\n</doc>"]) | JUNK,
    "jsonl": JUNK
    | WEIRD
    | WEIRD.map(lambda line: line[: len(line) // 2])
    | st.sampled_from([b'{"text": null}', b'{"text": 3}', b'{"txt": "a"}', b"[]", b"3", b'{"text": "\\ud800"}', b"{}"])
    | st.sampled_from([b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}", b'{"text": "\xff"}', b'{"text": "a", "b":}']),
}
GOOD = {  # a sound document and its separator, whatever comes before
    "text": "good {}.\n\n".format,
    "wikiextractor": '<doc id="1">\ngood {}.\n</doc>\n'.format,
    "jsonl": lambda number: json.dumps({"text": f"good {number}."}) + "\n",
}


def sound(out: Path) -> set[str]:
    return {sentence for document in documents(out) for sentence in document if sentence.startswith("good")}


def prepare_bytes(kind: str, content: dict[str, bytes], needed: set[str], **options) -> dict | None:
    """The manifest of a corpus from files of this content; None where a UserError said why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in").mkdir()
        for name, data in content.items():
            (Path(folder) / "in" / name).write_bytes(data)
        out = Path(folder) / "out"
        try:
            manifest, _ = run(out, f"{kind}:{folder}/in/*", **options)
        except UserError as error:
            assert not needed, error
            assert "\n" not in str(error)
            return None
        assert needed <= sound(out)
        return manifest


@settings(max_examples=50)
@given(st.data())
def test_mixed_records(data):
    kind = data.draw(st.sampled_from(sorted(BAD)))
    suffix = data.draw(st.sampled_from(sorted(CODECS)))
    compress, recover = CODECS[suffix]
    raw, ends = b"", {}
    for number, bad in enumerate(data.draw(st.lists(st.none() | BAD[kind], max_size=12))):
        if bad is None:
            raw += GOOD[kind](number).encode()
            ends[f"good {number} ."] = len(raw)
        else:
            raw += bad + (b"\n\n" if kind == "text" else b"\n")
    packed = compress(raw)
    damage = data.draw(st.sampled_from(["none", "none", "cut", "garbage"]))
    if damage == "cut":
        packed = packed[: data.draw(st.integers(0, len(packed)))]
    available = len(recover(packed)) if packed else 0
    if damage == "garbage":
        packed += data.draw(st.binary(min_size=1, max_size=30))
    needed = {text for text, end in ends.items() if end <= available}
    options = {"undecodable": data.draw(st.sampled_from(["replace", "skip"]))}
    options |= {"documents": "blank-line"} if kind == "text" else {}
    prepare_bytes(kind, {f"a{suffix}": packed}, needed, **options)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_truncated_file_keeps_its_complete_documents_and_is_reported(suffix):
    noise = random.Random(0).choices("abcdefghij", k=120_000)  # so that compression cannot hold all in one block
    lines = [json.dumps({"text": f"good {number}. " + "".join(noise[number * 40 :][:40])}) for number in range(3000)]
    packed = CODECS[suffix][0]("".join(f"{line}\n" for line in lines).encode())
    cut = packed[: len(packed) * 3 // 4]
    complete = CODECS[suffix][1](cut).count(b"\n")
    assert 0 < complete < 3000
    manifest = prepare_bytes("jsonl", {f"a{suffix}": cut, "b": GOOD["jsonl"](99_999).encode()}, {"good 99999 ."})
    assert splits(manifest)["train"]["documents"] == complete + 1
    assert manifest["counts"][UNREADABLE]["count"] == 1
    assert f"a{suffix}: " in manifest["counts"][UNREADABLE]["first"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_truncated_document_is_left_out_whole(monkeypatch, suffix):
    monkeypatch.setattr(cutting, "WINDOW", 256)
    packed = CODECS[suffix][0](b"".join(b"good %d.\n" % number for number in range(5000)))
    content = {f"a{suffix}": packed[:-5], "b": b"good 5000."}
    manifest = prepare_bytes("text", content, {"good 5000 ."})
    assert splits(manifest)["train"] == {"documents": 1, "sentences": 1, "tokens": 9}
    assert manifest["counts"][UNREADABLE]["count"] == 1


def test_each_malformed_record_is_counted_with_its_place():
    lines = ['{"text": "good 1."}', "{", "[]", '{"text": "good 2."}']
    manifest = prepare_bytes("jsonl", {"a": "\n".join(lines).encode()}, {"good 1 .", "good 2 ."})
    assert manifest["counts"][MALFORMED]["count"] == 2
    assert "a, line 2: Expecting property name" in manifest["counts"][MALFORMED]["first"]
    text = b"stray\n<doc >\nlost\n<doc >\ngood 1.\n</doc>\n</doc>\n<doc >\nno end"
    manifest = prepare_bytes("wikiextractor", {"a": text}, {"good 1 ."})
    assert manifest["counts"][MALFORMED]["count"] == 4


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


FILES = {
    "text:a.txt": lambda path: path.write_text(LINES),
    "jsonl:a.jsonl": lambda path: path.write_text(LINES),
    "jsonl:a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "jsonl:a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES.encode())),
    "parquet:a.parquet": parquet,
}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), TimeoutError("timed out")])
@pytest.mark.parametrize("spec", FILES)
def test_a_disk_or_a_network_that_fails_is_no_damage(tmp_path, monkeypatch, spec, error):
    kind, _, name = spec.partition(":")
    FILES[spec](tmp_path / name)
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


@pytest.mark.parametrize("spec", [spec for spec in FILES if spec.endswith(("gz", "zst", "parquet"))])
def test_damage_is_skipped_and_counted(tmp_path, spec):
    kind, _, name = spec.partition(":")
    FILES[spec](tmp_path / name)
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
