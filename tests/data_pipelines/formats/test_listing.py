"""Which files a source names, where they lie, and what is left out and said."""

import os

import fsspec
import pytest

from data_pipelines.errors import UserError
from data_pipelines.formats import listing, source, table
from data_pipelines.formats.problems import CORPUS, HIDDEN, LINKED, OTHER, OWN, Problems, printable
from tests.data_pipelines.formats.reading import ranges, read, texts


def plan(spec, exclude=()):
    problems = Problems()
    units = table.plan([table.parse(spec)], problems, exclude)
    return [os.path.basename(part.path) for unit in units for part in unit], problems


def test_a_folder_gives_its_text_files_and_says_what_else_lies_there(tmp_path):
    for name in ("a.txt", "b.md", "README", "c.txt.gz", "d.TEXT", "e.json", "f.tar.gz", "g.png", ".h.md", ".git/i.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("Text.")
    names, problems = plan(f"text:{tmp_path}")
    assert names == ["README", "a.txt", "b.md", "c.txt.gz", "d.TEXT"]
    assert problems[OTHER]["count"] == 3
    assert problems[HIDDEN]["count"] == 2
    assert plan(f"text:{tmp_path}/*.json")[0] == ["e.json"]  # a pattern says what is meant


@pytest.mark.parametrize(
    ("kind", "own"), [("conll", "a.conllu"), ("parallel", "a.tsv"), ("wikiextractor", "wiki_00"), ("fasta", "a.fa")]
)
def test_a_folders_other_files_are_none_of_the_format(tmp_path, kind, own):
    for name in (own, "README.md", "LICENSE.html", "stats.xml"):
        (tmp_path / name).write_text(">a b")
    names, problems = plan(f"{kind}:{tmp_path}")
    assert names == [own]
    assert problems[OTHER]["count"] == 3


def test_a_folder_without_files_of_the_format_says_what_is_there(tmp_path):
    (tmp_path / "a.html").write_text("Text.")
    with pytest.raises(UserError, match=r"has no files named \(no suffix\) .txt .*, but .*a.html; give a pattern"):
        plan(f"text:{tmp_path}")


def test_what_prepare_writes_is_never_its_source(tmp_path):
    (tmp_path / "a.txt").write_text("Text.")
    (tmp_path / "out" / "tokenizer").mkdir(parents=True)
    (tmp_path / "out" / "tokenizer" / "vocab.txt").write_text("[PAD]\n")
    for spec in (f"text:{tmp_path}", f"text:{tmp_path}/**/*.txt"):
        names, problems = plan(spec, exclude=[f"{tmp_path}/out"])
        assert names == ["a.txt"]
        assert problems[OWN]["count"] == 1


def test_other_corpora_are_no_source(tmp_path):
    (tmp_path / "a.txt").write_text("Text.")
    finished, begun = ("manifest.json", "tokenizer/vocab.txt"), (".partial/state.json", "parts/0/b.txt")
    for name in (*(f"finished/{name}" for name in finished), *(f"begun/{name}" for name in begun)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "no corpus" / ".partial").mkdir(parents=True)
    (tmp_path / "no corpus" / "c.txt").write_text("Text.")
    for spec in (f"text:{tmp_path}", f"text:{tmp_path}/**/*.txt"):
        names, problems = plan(spec)
        assert names == ["a.txt", "c.txt"]
        assert problems[CORPUS]["count"] == 2
        assert plan(spec, [f"{tmp_path}/begun"])[1][CORPUS]["count"] == 1  # one's own is not said to be another


def test_links_to_folders_are_followed_once_and_loops_end(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("Text.")
    (tmp_path / "in" / "sub" / "a.txt").write_text("Text.")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "sub" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in" / "sub")
    names, problems = plan(f"text:{tmp_path}/in")
    assert sorted(names) == ["a.txt", "b.txt"]
    assert problems[LINKED]["count"] == 2
    names, problems = plan(f"text:{tmp_path}/in/**/*.txt")
    assert sorted(names) == ["a.txt", "b.txt"]
    assert problems[LINKED]["count"] == 2


def test_a_pattern_with_two_stars_matches_at_any_depth(tmp_path, monkeypatch):
    for name in ("a.txt", "b.md", "x/c.txt", "x/y/d.txt", "x/y/e.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("Text.")
    assert plan(f"text:{tmp_path}/**/*.txt")[0] == ["a.txt", "c.txt", "d.txt"]
    assert plan(f"text:{tmp_path}/x/**/?.txt")[0] == ["c.txt", "d.txt"]
    assert plan(f"text:{tmp_path}/*/y/**")[0] == ["d.txt", "e.html"]
    monkeypatch.chdir(tmp_path)
    assert plan("text:**/*.txt")[0] == ["a.txt", "c.txt", "d.txt"]
    with pytest.raises(UserError, match="does not exist, and as a pattern matches no file"):
        plan(f"text:{tmp_path}/none/**/*.txt")


def test_a_file_name_that_is_not_utf8_is_read_and_printed(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9\n.txt"
    with open(path, "wb") as file:
        file.write(b"Text \xff.")
    found, problems = texts(f"text:{tmp_path}")
    assert found == ["Text \ufffd."]
    (seen,) = problems.values()
    assert seen["first"] == f"{tmp_path}/caf\\xe9\\n.txt"
    assert printable("\ud800").isprintable()
    with pytest.raises(UserError) as raised:
        plan(f"jsonl:{os.fsdecode(path)}/x")
    assert str(raised.value).isprintable()


def test_the_version_of_a_file_changes_with_its_content_and_is_in_the_plan(tmp_path):
    (tmp_path / "a.txt").write_text("Text.")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    one = table.parse(f"text:{tmp_path}")
    (before,) = ranges(one)
    assert before.version == listing.version(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text("Tent.")
    assert ranges(one)[0].version != before.version


@pytest.fixture
def memory():
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def test_sources_are_read_by_fsspec(memory, monkeypatch):
    monkeypatch.setattr(source, "SHARD", 500)
    lines = "".join(f"Line {number}.\n" for number in range(100))
    memory.pipe({"/c/a.txt": lines.encode(), "/c/sub/b.txt": b"Text.", "/c/.h/d.txt": b"No.", "/c/e.json": b"{}"})
    assert texts("text:memory://c")[0] == [lines, "Text."]
    assert len(ranges(table.parse("text:memory://c"))) > 2
    assert texts("text:memory://c/**/b.*")[0] == ["Text."]
    assert texts("text:memory://c/sub/b.txt")[0] == ["Text."]
    names, problems = plan("text:memory://c", exclude=["memory://c/sub"])
    assert set(names) == {"a.txt"}
    assert {problem: seen["count"] for problem, seen in problems.items()} == {HIDDEN: 1, OTHER: 1, OWN: 1}
    (found,) = (part for part in ranges(table.parse("text:memory://c")) if part.path.endswith("b.txt"))
    assert found.version == listing.version(found.path)
    with pytest.raises(UserError, match="--source text:memory://none does not exist"):
        read("text:memory://none")


def test_a_store_without_its_package_or_out_of_reach_is_an_error(memory, monkeypatch):
    with pytest.raises(UserError, match="Protocol not known"):
        read("text:nosuch://bucket/a")
    monkeypatch.setattr(type(memory), "exists", lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"--source text:memory://c: cannot be listed \(division by zero\)"):
        read("text:memory://c")
