"""Every kind of source gives its documents, whole and in order, plain or compressed, cut or not; a new one, too."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.formats import builtin, files, source, table
from data_pipelines.formats.problems import EMPTY, REPLACED, SKIPPED, Problems
from tests.data_pipelines.formats.reading import texts
from tests.data_pipelines.prepared import documents, run
from tests.data_pipelines.tiny_texts import TEXTS, TinyTexts

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.compress(data[: len(data) // 2]) + zstandard.compress(data[len(data) // 2 :]),
}


PLAIN = {
    "text": ({"documents": "blank-line"}, "\n\nFirst text.\nTwo sentences.\r\n \t\r\nAnother text & <more>."),
    "jsonl": ({"field": ("body",)}, '{"body": "First text. Two sentences."}\n\n{"body": "Another text & <more>."}'),
    "wikiextractor": (
        {},
        '<doc id="1" title="A">\nFirst text.\n\nTwo sentences.\n</doc>\n'
        '<doc id="2">\nAnother text &amp; &lt;more&gt;.\n</doc>\n',
    ),
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", PLAIN)
def test_records_are_documents_plain_or_compressed(tmp_path, kind, suffix):
    options, text = PLAIN[kind]
    (tmp_path / f"a_0{suffix}").write_bytes(COMPRESS[suffix](text.encode()))
    run(tmp_path / "out", f"{kind}:{tmp_path}/a_*", **options)
    assert documents(tmp_path / "out") == [["First text .", "Two sentences ."], ["Another text & < more > ."]]


@pytest.mark.parametrize("undecodable", ["replace", "skip"])
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), "dictionary"])
def test_a_string_that_is_no_utf_8_costs_no_other_row(tmp_path, kind, undecodable):
    stored = pyarrow.string() if kind == "dictionary" else kind
    column = pyarrow.array([b"One.", b"T\xffo.", None, b"Three."]).cast(pyarrow.binary()).view("string")
    column = column.cast(stored) if stored != pyarrow.string() else column
    rows = pyarrow.table({"text": column.dictionary_encode() if kind == "dictionary" else column})
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    with pyarrow.ipc.new_stream(tmp_path / "set" / "a.arrow", rows.schema) as stream:
        stream.write_table(rows)
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    problem, second = (REPLACED, ["T\ufffdo."]) if undecodable == "replace" else (SKIPPED, [])
    for spec in (f"arrow:{tmp_path}/set", f"parquet:{tmp_path}/a.parquet"):
        found, problems = texts(spec, undecodable=undecodable)
        assert found == ["One.", *second, "Three."]
        assert {name: said["count"] for name, said in problems.items()} == {problem: 1, EMPTY: 1}


def test_a_tfds_example_is_a_document(tmp_path, monkeypatch):
    TinyTexts(data_dir=tmp_path / "tfds", file_format="array_record").download_and_prepare()
    options = {"tfds_dir": str(tmp_path / "tfds"), "field": ("body",), "values": ("label:int", "body:text")}
    run(tmp_path / "out", "tfds:tiny_texts:train", **options)
    assert sorted(documents(tmp_path / "out")) == [[text.replace(".", " .")] for text in TEXTS]
    (part,) = Corpus(tmp_path / "out").parts
    assert [TEXTS[label] for label in part.column("train", "label")] == part.column("train", "body").tolist()
    one = table.parse("tfds:tiny_texts:train", tfds_dir=options["tfds_dir"], fields=("body",))
    monkeypatch.setattr(source, "SHARD", 100)  # of 250 bytes
    assert [len(unit) for unit in table.plan([one], Problems())] == [1, 1, 1]
    with pytest.raises(UserError, match="--field text: tiny_texts:train has no such feature; it has body, label"):
        run(tmp_path / "other", "tfds:tiny_texts:train", tfds_dir=options["tfds_dir"])


def test_the_builtin_source_is_two_megabytes_of_documentation():
    found = builtin.files()
    assert len(list(builtin.documents(found[0]))) > 50
    (argparse,) = (path for path in found if path.name == "argparse.py")
    (text,) = builtin.documents(argparse)
    assert text.startswith("Command-line parsing library")
    assert "import" not in text.split("\n\n")[0].split()


@pytest.mark.parametrize("shard", [50, 777, 5000, 1 << 20])
@pytest.mark.parametrize("kind", ["file", "blank-line", "jsonl", "wikiextractor"])
def test_cutting_a_file_into_shards_changes_no_document(tmp_path, monkeypatch, kind, shard):
    monkeypatch.setattr(source, "SHARD", shard)
    paragraphs = [f"Line one of {number}.\nLine two {'é' * (number % 97)}." for number in range(300)]
    form = {"jsonl": lambda text: json.dumps({"text": text}), "wikiextractor": "<doc>\n{}\n</doc>".format}
    text = ("\n" if kind == "jsonl" else "\n\n").join(form.get(kind, str)(paragraph) for paragraph in paragraphs)
    (tmp_path / "a").write_text(text, "utf-8")
    spec = f"{kind if kind in form else 'text'}:{tmp_path}/a"
    options = {} if kind in form else {"documents": kind}
    assert len(table.plan([table.parse(spec, **options)], Problems())) > 1 or shard > 5000
    assert texts(spec, **options) == ([text] if kind == "file" else paragraphs, {})


def test_a_shard_holds_many_small_files(tmp_path):
    for number in range(50):
        (tmp_path / f"{number}.txt").write_text("Text.")
    assert len(table.plan([table.parse(f"text:{tmp_path}")], Problems())) == 1


def test_a_record_too_long_for_memory_is_counted_and_its_neighbours_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 64)
    monkeypatch.setattr(files, "LARGEST_RECORD", 500)
    long = "x" * 1000
    good = '{"text": "good"}'
    (tmp_path / "a.jsonl").write_text(f'{good}\n{{"text": "{long}"}}\n{good}\n{{"text": "{long}"}}')
    assert texts(f"jsonl:{tmp_path}/a.jsonl")[0] == ["good", "good"]
    (tmp_path / "a.txt").write_text(f"good\n\n{long}\n\n" + "short\n" * 100 + "\ngood")
    found, problems = texts(f"text:{tmp_path}/a.txt", documents="blank-line")
    assert found == ["good", "good"]
    assert [seen["count"] for seen in problems.values()] == [2]
    (tmp_path / "wiki").write_text(f"<doc>\ngood\n</doc>\n<doc>\n{long}\n</doc>\n<doc>\ngood\n</doc>\n")
    assert texts(f"wikiextractor:{tmp_path}/wiki")[0] == ["good", "good"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("pdf:a", "--source pdf:a: .*unknown kind 'pdf'; use one of text, jsonl"),
        ("text", "--source text: .*write text:DIR_OR_PATTERN"),
        ("builtin:a", "--source builtin:a: .*builtin takes no location"),
        ("tfds:imdb", "--source tfds:imdb: .*write tfds:NAME:SPLIT"),
        ("tfds:no_such_set:train", "--source tfds:no_such_set:train cannot be opened: .*no_such_set"),
        ("text:nothing*.txt", "does not exist, and as a pattern matches no file"),
        ("text:empty", "all 1 files are empty"),
        ("text:links", r"--source: cannot read .*a.txt \(No such file or directory\)"),
        ("parquet:a.parquet", "--field text: .*a.parquet has no such column; it has body"),
        ("jsonl:a.jsonl", "--field text: .*a.jsonl has no such field; it has body, id"),
    ],
)
def test_a_source_that_cannot_be_is_an_error(tmp_path, monkeypatch, spec, said):
    for name in ("folder", "empty", "links"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty" / "a").write_text("")
    (tmp_path / "links" / "a.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "links" / "b.txt").write_text("Text.")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('not json\n{"body": "a", "id": 1}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        table.plan([table.parse(spec, tfds_dir=str(tmp_path))], Problems())
