"""Which files a source names, where they lie, and what is left out and said."""

import os

import fsspec
import pytest

from data_pipelines.errors import UserError
from data_pipelines.formats import table
from data_pipelines.formats.problems import CORPUS, HIDDEN, LINKED, OTHER, OWN, Problems
from tests.data_pipelines.formats.reading import read


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
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.txt").write_text("Text.")
    for spec in (f"text:{tmp_path}", f"text:{tmp_path}/**/*.txt", f"text:{tmp_path}/*/*.txt"):
        names, problems = plan(spec, exclude=[f"{tmp_path}/out"])
        assert names == ["in.txt"]
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
    for spec in (f"text:{tmp_path}/in", f"text:{tmp_path}/in/**/*.txt"):
        names, problems = plan(spec)
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


@pytest.fixture
def memory():
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def test_a_store_without_its_package_or_out_of_reach_is_an_error(memory, monkeypatch):
    with pytest.raises(UserError, match="Protocol not known"):
        read("text:nosuch://bucket/a")
    monkeypatch.setattr(type(memory), "exists", lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"--source text:memory://c: cannot be listed \(division by zero\)"):
        read("text:memory://c")
