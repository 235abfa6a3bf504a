"""Values of documents and languages of segments go from a source to a corpus's columns, and to the rows of layouts."""

import json

import numpy as np
import pyarrow.parquet
import pytest

from data_pipelines.__main__ import main
from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import prefix_tokens
from data_pipelines.examples.next_tokens import PackedDocuments, StridedDocuments
from data_pipelines.formats.values import MISSING
from data_pipelines.tokenizers import prefixes, stored
from tests.data_pipelines.corpora import epoch
from tests.data_pipelines.prepared import command, content, run

KEPT = ("year", "count:int", "score:float", "url:text")
YEARS = ("--values", "year", "--prefix", "year", "--heldout", "0", "--tokenizer", "bytes")


def record(number):
    """Without some values now and then; texts differ in length, so that documents that are held out are seen."""
    said = {"text": f"{number} " + "word. " * (number % 7), "year": 2000 + number % 5, "score": number / 7}
    said |= {"count": number**6 if number % 3 else None, "url": f"https://é.org/{number}"}
    return {name: value for name, value in said.items() if number % 11 or name in ("text", "year")}


def write(folder, kind, records):
    records = list(records)
    file = folder / f"{len([*folder.iterdir()])}.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(one) + "\n" for one in records))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    return f"{kind}:{file}"


def columns(corpus, *names):
    """Of each document of a corpus: its text's first token and its values."""
    found = []
    for part in corpus.parts:
        for split in ("train", "heldout"):
            first = part.sentences(split)[part.documents(split)[:-1]]
            texts = [part.array(split, "tokens")[at] for at in first]
            values = [part.column(split, name).tolist() for name in names]
            labels = [corpus.fields[name].values for name in names]
            values = [[known[n] for n in one] if known else one for known, one in zip(labels, values, strict=True)]
            found += zip(texts, *values, strict=True)
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_values_of_records_are_columns_of_the_corpus_whichever_processes_made_it(tmp_path, small, capsys, kind):
    told = {"values": KEPT, "tokenizer": "wordlevel", "part_size": 1, "vocab_size": 2000, "heldout": 0.1}
    sources = [write(tmp_path, kind, map(record, range(1, 800))), write(tmp_path, kind, map(record, range(800, 900)))]
    run(tmp_path / "c", *sources, **told)
    run(tmp_path / "d", *sources, **told | {"processes": 2})
    assert content(tmp_path / "c") == content(tmp_path / "d")
    corpus = Corpus(tmp_path / "c")
    assert len(corpus.parts) > 1 and corpus.size("heldout")["documents"] > 10
    corpus.verify()
    spelled = stored.load(corpus.tokenizer_path).tokenizer.id_to_token
    found = {int(spelled(int(first))): values for first, *values in columns(corpus, "year", "count", "score", "url")}
    for number in range(1, 900):
        said = record(number)
        year, count, score, url = found[number]
        assert (year, count, url) == (str(said["year"]), said.get("count") or MISSING, said.get("url", ""))
        assert np.isnan(score) if "score" not in said else score == pytest.approx(said["score"])
    assert corpus.fields["year"].values == tuple(map(str, range(2000, 2005)))
    problems = corpus.manifest["counts"]
    assert {name: problems[f"documents without {name}"]["count"] for name in ("count:int", "url:text")} == {
        "count:int": sum(record(number).get("count") is None for number in range(1, 900)),
        "url:text": 81,
    }
    assert main(["show", str(tmp_path / "c")]) == 0
    shown = capsys.readouterr().out
    assert "year: 2000, 2001, 2002, 2003, 2004" in shown and "url: https://é.org/" in shown
    file = tmp_path / "c" / "parts" / "000000" / "train" / "url.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="url.npy has changed since it was prepared"):
        Corpus(tmp_path / "c").verify()


def test_labels_of_parts_that_are_added_come_after_those_that_there_are(tmp_path, capsys):
    line = lambda label: {"text": "a", "label": label}
    told = ["--values", "label", "--tokenizer", "bytes", "--heldout", "0"]
    assert command(tmp_path / "c", *told, lines=[line("m"), line("k"), line(True)]) == 0
    assert command(tmp_path / "c", "--append", lines=[line("b"), line("k")]) == 0
    corpus = Corpus(tmp_path / "c")
    assert corpus.fields["label"].values == ("True", "k", "m", "b")
    assert [part.column("train", "label").tolist() for part in corpus.parts] == [[2, 1, 0], [3, 1]]
    assert command(tmp_path / "c", "--append", "--values", "score", lines=[line("b")]) == 2
    assert "--values ('score',): the corpus has ('label',), which --append cannot change" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "text", "names", "values"),
    [
        (
            "wikiextractor",
            '<doc id="7" url="https://a/?b=1&amp;c" title="Ä &quot;B&quot;">\nA\n</doc>\n<doc id="8">\nB\n</doc>\n',
            ("id", "url", "title"),
            [("7", "https://a/?b=1&c", 'Ä "B"'), ("8", "", "")],
        ),
        (
            "fasta",
            ">chr1 of a\tthing\n;no header\nACGT\nNNNNNNNNNNNNAC\n>chr2\nAAA\n",
            ("id", "description"),
            [("chr1", "of a\tthing"), ("chr1", "of a\tthing"), ("chr2", "")],
        ),
        (
            "conll",
            "# newdoc id = w-1\n" + "1\ta\t_\tX" + "\t_" * 6 + "\n\n# newdoc\n" + "1\tb\t_\tX" + "\t_" * 6 + "\n",
            ("id",),
            [("w-1",), ("",)],
        ),
    ],
)
def test_formats_without_records_have_values_of_their_own(tmp_path, kind, text, names, values):
    (tmp_path / "a.fa").write_text(text)
    run(tmp_path / "c", f"{kind}:{tmp_path}/a.fa", values=tuple(f"{name}:text" for name in names), tokenizer="bytes")
    assert [tuple(found) for _, *found in columns(Corpus(tmp_path / "c"), *names)] == values


def test_what_is_of_another_kind_is_missing_and_counted(tmp_path):
    found = ["199x", 1.5, 2**63, [1], None, "", "-7", 7.0]
    lines = [{"text": "a", "year": value, "label": value} for value in found]
    told = ["--values", "year:int", "label", "--tokenizer", "bytes", "--heldout", "0"]
    assert command(tmp_path / "c", *told, lines=lines) == 0
    corpus = Corpus(tmp_path / "c")
    years, labels = zip(*(values for _, *values in columns(corpus, "year", "label")), strict=True)
    assert years == (*[MISSING] * 6, -7, 7)
    assert labels == ("199x", "1.5", str(2**63), "", "", "", "-7", "7.0")
    counts = {problem: seen["count"] for problem, seen in corpus.manifest["counts"].items()}
    assert counts == {
        "documents without year:int": 6,
        "documents without label:label": 3,
    }


def test_a_header_across_blocks_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipelines.formats.files.BLOCK", 5)
    (tmp_path / "a.fa").write_text(">chromosome1 of somebody\nACGT\nAC\n>chromosome2\nA\n")
    run(tmp_path / "c", f"fasta:{tmp_path}/a.fa", values=("id:text", "description:text"), tokenizer="bytes")
    found = [tuple(values) for _, *values in columns(Corpus(tmp_path / "c"), "id", "description")]
    assert found == [("chromosome1", "of somebody"), ("chromosome2", "")]


def test_a_document_in_pieces_and_in_units_has_the_values_of_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipelines.formats.cutting.WINDOW", 64)
    lines = [{"text": "word. " * 50, "year": 1999}, {"text": "x", "year": 2001}]
    assert command(tmp_path / "c", "--values", "year:int", "--tokenizer", "bytes", "--heldout", "0", lines=lines) == 0
    assert [year for _, year in columns(Corpus(tmp_path / "c"), "year")] == [1999, 2001]


@pytest.mark.parametrize(
    ("more", "line", "said"),
    [
        (["--values", "yeer"], {"year": 1}, "--values yeer: "),
        (["--values", "yeer"], {"year": 1}, "has no such field; it has text, year"),
        (
            ["--values", "year:date"],
            {},
            "--values year:date: 'date' is not a kind; use one of label, int, float, text, as in year:int",
        ),
        (["--values", "tokens"], {}, "field 'tokens': use a name of small letters"),
        (["--values", "year", "year:int"], {}, "--values year year:int: year is given twice"),
        (["--values", "code", "--code", "A"], {}, "code is given twice"),
        (["--prefix", "year"], {}, "--prefix year: is no label; give --values year, without a kind"),
        (["--prefix", "year", "--values", "year:int"], {}, "--prefix year: is no label"),
        (["--prefix", "year", "--values", "year", "--code", "A"], {}, "--prefix year: --code also stands before"),
        (["--values", "id", "--source", "text:README.md"], {"id": 1}, "--values id: --source text:README.md has no"),
        (["--values", "sex", "--source", "fasta:a"], {"sex": 1}, "--source fasta:a has no such field but id, descr"),
        (["--language", "en,de"], {}, "--language en,de: --source jsonl:"),
        (["--language", "en,qq"], {}, "--language qq: is not known"),
    ],
)
def test_values_that_cannot_be_are_one_line(tmp_path, capsys, more, line, said):
    assert command(tmp_path / "c", "--tokenizer", "bytes", *more, lines=[{"text": "a", **line}]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_document_begins_with_the_token_of_its_year(tmp_path, capsys):
    lines = [{"text": f"{number}" * (1 + 2 * number), "year": 1990 + number % 3} for number in range(9)]
    assert command(tmp_path / "c", *YEARS, lines=lines) == 0
    corpus = Corpus(tmp_path / "c")
    tokens = {year: corpus.special[f"year_{year}"] for year in (1990, 1991, 1992)}
    assert list(tokens.values()) == [corpus.vocab_size - 3, corpus.vocab_size - 2, corpus.vocab_size - 1]
    made = stored.load(corpus.tokenizer_path)
    assert made.tokenizer.token_to_id("[year:1991]") == tokens[1991] == prefixes.token(made, "[year:1991]")
    assert prefix_tokens(corpus.parts[0], "train").tolist() == [tokens[line["year"]] for line in lines]
    rows = epoch(make_examples(PackedDocuments(6), corpus, "train", 1, seed=0))["tokens"]
    assert set(rows[:, 0].tolist()) <= {*tokens.values()} and {*tokens.values()} <= set(rows.ravel().tolist())
    end = corpus.special["sep"]
    for row in rows.tolist():
        for before, token, after in zip([end, *row], row, row[1:], strict=False):
            if token in tokens.values() and after > end:
                assert before == end and token == tokens[1990 + int(chr(after - 3)) % 3]
    strided = epoch(make_examples(StridedDocuments(6, 6), corpus, "train", 1, seed=0))
    assert set(strided["tokens"][:, 0].tolist()) == {*tokens.values()}
    # More of the years that there are; another tokenizer of the same years; and a year that there is not
    assert command(tmp_path / "c", "--append", lines=[{"text": "a", "year": 1992}]) == 0
    assert prefix_tokens(Corpus(tmp_path / "c").parts[1], "train").tolist() == [tokens[1992]]
    assert command(tmp_path / "c", "--append", lines=[{"text": "b", "year": 1993}]) == 2
    assert "year 1993: is not a year of the corpus" in capsys.readouterr().err
    given = [*YEARS[:-1], str(tmp_path / "c" / "tokenizer")]
    assert command(tmp_path / "d", *given, lines=[{"text": "a", "year": 1991}, {"text": "b"}]) == 0
    other = Corpus(tmp_path / "d")
    assert (other.special["year_1991"], other.special["year_"]) == (tokens[1991], corpus.vocab_size)


def test_values_that_cannot_be_tokens_are_one_line(tmp_path, capsys):
    lines = [{"text": "a", "year": number} for number in range(prefixes.MOST + 1)]
    assert command(tmp_path / "c", *YEARS, lines=lines) == 2
    assert "--prefix year: there are more than 1,000 different values" in capsys.readouterr().err
    assert command(tmp_path / "c", *YEARS, lines=[{"text": "a", "year": "19\n99"}]) == 2
    assert "--prefix year: '19\\n99' has characters that do not print" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tabs", "files", "records"])
def test_each_token_of_a_pair_has_its_language(tmp_path, kind):
    pairs = [("One. Two.", "Eins zwei."), ("Three", "Drei")]
    (tmp_path / "a.tsv").write_text("".join(f"{one}\t{two}\n" for one, two in pairs))
    for side, name in enumerate(("en", "de")):
        (tmp_path / f"b.{name}").write_text("".join(pair[side] + "\n" for pair in pairs))
    told = {"tabs": f"parallel:{tmp_path}/a.tsv", "files": f"parallel:{tmp_path}/b.en,{tmp_path}/b.de"}
    lines = [dict(zip(("a", "b"), pair, strict=True)) for pair in pairs] if kind == "records" else ()
    more = ["--field", "a", "--field", "b"] if lines else ["--source", told[kind]]
    (tmp_path / "c.txt").write_text("Ni hao.")
    more = [*more, "--source", f"text:{tmp_path}/c.txt"] if not lines else more
    languages = ["--language", "en,de"] + ([] if lines else ["--language", "zh"])
    assert command(tmp_path / "c", *more, *languages, "--tokenizer", "bytes", "--heldout", "0", lines=lines) == 0
    corpus = Corpus(tmp_path / "c")
    (part,) = corpus.parts
    values = corpus.fields["segment_languages"].values
    assert values == (("de", "en") if lines else ("de", "en", "zh"))
    size = corpus.size("train")["tokens"]
    tokens = part.read("train", "tokens", np.array([0, 5]), size - 5)
    found = part.read("train", "segment_languages", np.array([0, 5]), size - 5)
    expected = [("en", pair[0], "de", pair[1]) for pair in pairs]
    flat = [name for en, one, de, two in expected for name in [en] * len(one) + [de] * len(two)]
    flat += [] if lines else ["zh"] * len("Ni hao.")
    assert [[values[number] for number in row] for row in found] == [flat[: size - 5], flat[5:]]
    assert tokens.shape == found.shape
    sources = part.read("train", "sources", np.array([0]), size)[0]  # of a document, by token
    assert np.bincount(sources).tolist() == ([size] if lines else [size - 7, 7])
