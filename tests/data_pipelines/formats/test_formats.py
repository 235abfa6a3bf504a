"""Every kind of source gives its documents, whole and in order, plain or compressed, cut into shards or not."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipelines.errors import UserError
from data_pipelines.formats import builtin, cutting, files, source, table
from data_pipelines.formats.problems import EMPTY, NO_FIELD, REPLACED, SKIPPED, Problems
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
TWO = [["First text .", "Two sentences ."], ["Another text ."]]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_text_file_is_a_document(tmp_path, suffix):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("Another text.")
    (tmp_path / "in" / "sub" / "c.txt").write_text("Third.")
    (tmp_path / "in" / ".hidden").write_text("Not this.")
    (tmp_path / "in" / f"a.txt{suffix}").write_bytes(COMPRESS[suffix](b"First text. Two\nsentences.\n"))
    run(tmp_path / "out", f"text:{tmp_path}/in")
    assert documents(tmp_path / "out") == [*TWO, ["Third ."]]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_blank_lines_separate_documents(tmp_path, suffix):
    text = b"\n\nFirst text.\nTwo sentences.\r\n \t\r\nAnother text."
    (tmp_path / f"a.txt{suffix}").write_bytes(COMPRESS[suffix](text))
    run(tmp_path / "out", f"text:{tmp_path}/a.txt*", documents="blank-line")
    assert documents(tmp_path / "out") == TWO


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_json_line_is_a_document(tmp_path, suffix):
    lines = [json.dumps({"body": text}) for text in ("First text. Two sentences.", "Another text.")]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix]("\n\n".join(lines).encode()))
    run(tmp_path / "out", f"jsonl:{tmp_path}/a.jsonl*", field=("body",))
    assert documents(tmp_path / "out") == TWO


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_a_parquet_row_is_a_document(tmp_path, kind):
    column = pyarrow.array(["First text. Two sentences.", "Another text.", None], kind)
    table = pyarrow.table({"id": [1, 2, 3], "body": column})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    manifest, _ = run(tmp_path / "out", f"parquet:{tmp_path}/*.parquet", field=("body",))
    assert documents(tmp_path / "out") == TWO
    assert manifest["counts"]["empty documents"]["count"] == 1


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


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_wikiextractor_block_is_a_document(tmp_path, suffix):
    text = '<doc id="1" title="A">\nFirst text.\n\nTwo sentences.\n</doc>\n<doc id="2">\nAnother text.\n</doc>\n'
    (tmp_path / f"wiki_00{suffix}").write_bytes(COMPRESS[suffix](text.encode()))
    run(tmp_path / "out", f"wikiextractor:{tmp_path}/wiki_*")
    assert documents(tmp_path / "out") == TWO


def test_wikiextractor_text_is_unescaped(tmp_path):
    (tmp_path / "wiki_00").write_text("<doc>\nA &lt;b&gt; &amp; c.\n</doc>\n")
    assert texts(f"wikiextractor:{tmp_path}/wiki_00")[0] == ["A <b> & c."]


def test_a_tfds_example_is_a_document(tmp_path, monkeypatch):
    TinyTexts(data_dir=tmp_path / "tfds", file_format="array_record").download_and_prepare()
    options = {"tfds_dir": str(tmp_path / "tfds"), "field": ("body",)}
    run(tmp_path / "out", "tfds:tiny_texts:train", **options)
    assert sorted(documents(tmp_path / "out")) == [[text.replace(".", " .")] for text in TEXTS]
    one = table.parse("tfds:tiny_texts:train", tfds_dir=options["tfds_dir"], fields=("body",))
    monkeypatch.setattr(source, "SHARD", 100)  # of 250 bytes
    assert [len(unit) for unit in table.plan([one], Problems())] == [1, 1, 1]
    with pytest.raises(UserError, match="--field text: tiny_texts:train has no such feature; it has body, label"):
        run(tmp_path / "other", "tfds:tiny_texts:train", tfds_dir=options["tfds_dir"])


def test_the_builtin_source_is_two_megabytes_of_documentation():
    found = builtin.files()
    assert found == builtin.files()
    topics = list(builtin.documents(found[0]))
    assert len(topics) > 50
    assert any("The assert statement" in text or '"assert" statement' in text for text in topics)
    (argparse,) = (path for path in found if path.name == "argparse.py")
    (text,) = builtin.documents(argparse)
    assert text.startswith("Command-line parsing library")
    assert "Object for parsing command line strings into Python objects." in text
    assert "import" not in text.split("\n\n")[0].split()
    assert sum(path.stat().st_size for path in found) > 8e6  # source code, of which a sixth is docstrings


def test_several_sources_follow_one_another(tmp_path):
    (tmp_path / "a.txt").write_text("First text. Two sentences.")
    (tmp_path / "b.jsonl").write_text('{"text": "Another text."}')
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", f"jsonl:{tmp_path}/b.jsonl")
    assert documents(tmp_path / "out") == TWO


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


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("separator", ["\n", " ", ""])
def test_a_document_larger_than_a_block_is_whole(tmp_path, monkeypatch, suffix, separator):
    monkeypatch.setattr(cutting, "WINDOW", 1024)
    text = separator.join(f"Wörd{number}." for number in range(2000))
    (tmp_path / f"a{suffix}").write_bytes(COMPRESS[suffix](text.encode()))
    for undecodable in ("replace", "skip"):
        assert texts(f"text:{tmp_path}", undecodable=undecodable) == ([text], {})


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
        ("pdf:a", "unknown kind 'pdf'; use one of text, jsonl"),
        ("text", "write text:DIR_OR_PATTERN"),
        ("builtin:a", "builtin takes no location"),
        ("tfds:imdb", "write tfds:NAME:SPLIT"),
    ],
)
def test_a_source_of_no_known_form_is_an_error(spec, said):
    with pytest.raises(UserError, match=f"--source {spec}: .*{said}"):
        table.parse(spec)


def test_an_unknown_tfds_data_set_is_an_error(tmp_path):
    one = table.parse("tfds:no_such_set:train", tfds_dir=str(tmp_path))
    with pytest.raises(UserError, match="--source tfds:no_such_set:train cannot be opened: .*no_such_set"):
        table.plan([one], Problems())


def test_missing_and_empty_sources_are_errors(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="does not exist, and as a pattern matches no file"):
        table.plan([table.parse(f"text:{tmp_path}/nothing*.txt")], Problems())
    with pytest.raises(UserError, match="has no files"):
        table.plan([table.parse(f"text:{tmp_path}/folder")], Problems())
    (tmp_path / "folder" / "a").write_text("")
    with pytest.raises(UserError, match="all 1 files are empty"):
        table.plan([table.parse(f"text:{tmp_path}/folder")], Problems())


def test_a_source_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "b.txt").write_text("Text.")
    with pytest.raises(UserError, match=r"--source: cannot read .*a.txt \(No such file or directory\)"):
        table.plan([table.parse(f"text:{tmp_path}")], Problems())


def test_a_parquet_file_without_the_column_is_an_error(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="--field text: .*a.parquet has no such column; it has body"):
        table.plan([table.parse(f"parquet:{tmp_path}/a.parquet")], Problems())


def test_json_lines_without_the_field_name_those_that_there_are(tmp_path):
    (tmp_path / "a.jsonl").write_text('not json\n{"body": "a", "id": 1}\n')
    with pytest.raises(UserError, match="--field text: .*a.jsonl has no such field; it has body, id"):
        table.plan([table.parse(f"jsonl:{tmp_path}/a.jsonl")], Problems())
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"body": "b", "id": 1}\n')
    assert texts(f"jsonl:{tmp_path}/a.jsonl")[1][NO_FIELD]["first"].endswith("line 2: it has no text but body, id")
