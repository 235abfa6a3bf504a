"""`parallel:` pairs stay pairs, from two files or one, however these are cut; what does not pair is an error."""

import gzip

import pytest

from data_pipelines.errors import UserError
from data_pipelines.formats import files, source, table
from data_pipelines.formats.parallel import FORMAT
from data_pipelines.formats.problems import HALF, MALFORMED, SKIPPED, Problems
from tests.data_pipelines.formats.reading import ranges, read

PAIRS = [(f"Line {number}{'.' * (number % 7)}", f"第{number}行{'。' * (number % 5)}") for number in range(500)]


def pairs(spec, **options):
    documents, problems = read(spec, **options)
    assert {tuple(segment.name for segment in one.segments) for one in documents} <= {("source", "target")}
    return [tuple(segment.text for segment in one.segments) for one in documents], problems


def write(folder, suffix="", name="a", end="\n"):
    pack = gzip.compress if suffix else bytes
    for language, side in (("en", 0), ("zh", 1)):
        text = "\n".join(pair[side] for pair in PAIRS) + end
        (folder / f"{name}.{language}{suffix}").write_bytes(pack(text.encode()))
    return f"parallel:{folder}/{name}.en{suffix},{folder}/{name}.zh{suffix}"


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shard", [100, 1000, 1 << 20])
def test_lines_of_two_files_are_pairs(tmp_path, monkeypatch, shard, suffix, end):
    monkeypatch.setattr(source, "SHARD", shard)
    monkeypatch.setattr(files, "BLOCK", 256)
    spec = write(tmp_path, suffix, end=end)
    assert pairs(spec) == (PAIRS, {})
    count = len(ranges(table.parse(spec)))
    assert count > 10 if shard < 5000 and not suffix else count == 1


@pytest.mark.parametrize("shard", [100, 1 << 20])
def test_the_sides_of_tabs_are_pairs(tmp_path, monkeypatch, shard):
    monkeypatch.setattr(source, "SHARD", shard)
    (tmp_path / "a.tsv").write_text("".join(f"{one}\t{other}\tof the third column\r\n" for one, other in PAIRS))
    assert pairs(f"parallel:{tmp_path}/a.tsv") == (PAIRS, {})
    (tmp_path / "a.tsv").write_text("no tab\na\tb")
    assert pairs(f"parallel:{tmp_path}/a.tsv")[1][MALFORMED]["count"] == 1


def test_patterns_pair_files_in_the_order_of_their_names(tmp_path):
    write(tmp_path, name="b")
    write(tmp_path, name="a")
    assert pairs(f"parallel:{tmp_path}/*.en,{tmp_path}/*.zh")[0] == PAIRS * 2
    (tmp_path / "b.zh").unlink()
    with pytest.raises(UserError, match="2 files on one side and 1 on the other"):
        pairs(f"parallel:{tmp_path}/*.en,{tmp_path}/*.zh")


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shard", [100, 1 << 20])
def test_unequal_numbers_of_lines_are_an_error(tmp_path, monkeypatch, shard, suffix):
    monkeypatch.setattr(source, "SHARD", shard)
    spec = write(tmp_path, suffix)
    for added in ("one\n", "one"):
        spec = write(tmp_path, suffix)
        with open(tmp_path / f"a.zh{suffix}", "ab") as file:
            file.write(gzip.compress(added.encode()) if suffix else added.encode())
        with pytest.raises(UserError, match="a.en.* and .*a.zh.* have not as many lines as each other"):
            pairs(spec)
    if shard == 100 and not suffix:  # long plain files are compared before any work
        with pytest.raises(UserError, match=r"\(500 and 501\)"):
            ranges(table.parse(spec))


def test_a_pair_with_an_empty_side_or_bad_bytes_leaves_the_others_in_step(tmp_path):
    (tmp_path / "a").write_bytes(b"one\n\n \nfour\nfive \xff\n")
    (tmp_path / "b").write_bytes(b"1\n2\n3\n4\n5\n")
    spec = f"parallel:{tmp_path}/a,{tmp_path}/b"
    found, problems = pairs(spec, undecodable="skip")
    assert found == [("one", "1"), ("four", "4")]
    assert {problem: seen["count"] for problem, seen in problems.items()} == {HALF: 2, SKIPPED: 1}
    assert pairs(spec)[0][-1] == ("five \ufffd", "5")


def test_either_file_that_changes_after_the_plan_is_seen(tmp_path):
    one = table.parse(write(tmp_path))
    (part,) = table.plan([one], Problems())[0]
    assert table.changed(part) is None
    (tmp_path / "a.zh").write_text("other")
    assert table.changed(part) == f"{tmp_path}/a.zh"
    assert FORMAT.segments(one.options) == ("source", "target")


@pytest.mark.parametrize("location", ["a,b,c", "a,", ",b"])
def test_two_files_are_named(location):
    with pytest.raises(UserError, match="write parallel:FILE,FILE or parallel:FILE.tsv"):
        ranges(table.parse(f"parallel:{location}"))
