"""`fasta:` sequences are documents without headers, line ends and gaps, whole however they are cut."""

import gzip
import random

import pytest

from data_pipelines.errors import UserError
from data_pipelines.formats import cutting, files, source, table
from data_pipelines.formats.problems import EMPTY
from tests.data_pipelines.formats.reading import ranges, read, texts


def test_a_sequence_is_a_document_without_header_and_line_ends(tmp_path):
    (tmp_path / "a.fa").write_bytes(b">one some words\r\nACG T\r\nacgn\r\n>two\n;comment\nMKV*\n\n>empty\n>three\nA\tC")
    (tmp_path / "notes.txt").write_text("no FASTA")
    found, problems = texts(f"fasta:{tmp_path}")
    assert found == ["ACGTACGN", "MKV*", "AC"]
    assert problems[EMPTY]["count"] == 1
    (tmp_path / "a.fa").write_bytes(b">one\rACG\rT\r>two\rMKV")  # as old Macs end lines
    assert texts(f"fasta:{tmp_path}") == (["ACGT", "MKV"], {})


@pytest.mark.parametrize("width", [7, 60, 100_000])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_genome_is_the_same_however_it_is_written_and_cut(tmp_path, monkeypatch, width, suffix):
    monkeypatch.setattr(source, "SHARD", 2000)
    monkeypatch.setattr(files, "BLOCK", 333)
    monkeypatch.setattr(cutting, "WINDOW", 512)
    letters = random.Random(0)
    genome = ["".join(letters.choices("ACGT", k=length)) for length in (5000, 1, 400, 300, 3000, 20)]
    lines = [[s[at : at + width] for at in range(0, len(s), width)] for s in genome]
    text = "".join(f">sequence {number}\n" + "\n".join(found) + "\n" for number, found in enumerate(lines))
    data = text.encode()
    (tmp_path / f"a.fa{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    spec = f"fasta:{tmp_path}"
    assert texts(spec) == (genome, {})
    assert max(len(one.segments[0].text) for one in read(spec)[0]) <= 1024
    assert (len(ranges(table.parse(spec))) > 2) == (not suffix)


def test_a_run_of_ns_ends_a_document_where_it_is_a_gap(tmp_path):
    n = lambda number: "N" * number
    gene = "ACGT" * 300  # tells that it is no protein
    sequences = [
        n(30) + "acg" + n(9) + "t" + n(10) + "GG" + n(5) + "\n" + n(5) + "cc" + n(4), n(50), gene + n(10) + "A" + n(40),
        "MLQ" + n(20) + "K",
    ]  # fmt: skip
    (tmp_path / "a.fa").write_text("".join(f">{index}\n{text}\n" for index, text in enumerate(sequences)))
    found, problems = texts(f"fasta:{tmp_path}")
    assert found == ["ACG" + n(9) + "T", "GG", "CC" + n(4), gene, "A", "MLQ" + n(20) + "K"]
    assert problems == {EMPTY: {"count": 1, "first": str(tmp_path / "a.fa")}}


@pytest.mark.parametrize("width", [9, 60, 100_000])
def test_gaps_are_found_wherever_lines_and_blocks_end(tmp_path, monkeypatch, width):
    monkeypatch.setattr(source, "SHARD", 2000)
    monkeypatch.setattr(files, "BLOCK", 37)
    monkeypatch.setattr(cutting, "WINDOW", 256)
    letters = random.Random(1)
    stretches = ["A" + "".join(letters.choices("ACGTN", k=length)) + "C" for length in (1500, 1, 700, 20, 3000, 2)]
    assert not any("N" * 10 in stretch for stretch in stretches)
    genome = "".join(stretch + "N" * letters.choice([10, 11, 100, 5000]) for stretch in stretches)
    lines = "\n".join(genome[at : at + width] for at in range(0, len(genome), width))
    (tmp_path / "a.fa").write_text(f">chromosome\n{lines}\n>next\nAC\n")
    assert texts(f"fasta:{tmp_path}") == ([*stretches, "AC"], {})


@pytest.mark.parametrize("text", ["ACGT\n", " x\n>a\nACGT\n"])
def test_what_has_no_header_is_no_fasta(tmp_path, text):
    (tmp_path / "a.fa").write_text(text)
    with pytest.raises(UserError, match="a.fa does not begin with '>', so it is not FASTA"):
        texts(f"fasta:{tmp_path}/a.fa")
