"""The planted bugs can still be planted, and planting tells those that a test catches from those that none does."""

import pytest

from tests import mutants, planted
from tests.planted import Bug

BUGS = planted.read()


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_changes_one_place_that_is_there(bug):
    assert (planted.ROOT / bug.file).read_text().count(bug.old) == 1
    assert bug.new != bug.old
    assert bug.tests and all((planted.ROOT / file).is_file() for file in bug.tests)


def test_names_of_planted_bugs_are_their_own():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 60


def a_tree(folder, test):
    """A small repository whose tests are this text."""
    root = folder / "root"
    root.mkdir()
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--disable-plugin-autoload"\n')
    (root / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (root / "test_sums.py").write_text(test)
    return root


def test_a_bug_is_caught_by_the_test_that_fails_with_it_and_seen_again_only_when_something_changed(tmp_path, capsys):
    root, cache = a_tree(tmp_path, "import sums\ndef test_zero(): assert sums.add(3, 0) == 3\n"), tmp_path / "cache"
    times, minus = (Bug(name, "sums.py", "a + b", f"a {name} b", ["test_sums.py"]) for name in "*-")
    assert planted.hunt([times, minus], root, cache, jobs=2) == {"*": "test_sums.py::test_zero", "-": ""}
    assert "SURVIVED  - (sums.py)" in capsys.readouterr().out
    assert (root / "sums.py").read_text().count("a + b") == 1
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(planted, "noticed", lambda *_: "not again")
        assert planted.hunt([times, minus], root, cache, jobs=1) == {"*": "test_sums.py::test_zero", "-": ""}
        (root / "test_sums.py").write_text("import sums\ndef test_one(): assert sums.add(3, 1) == 4\n")
        assert planted.hunt([minus], root, cache, jobs=1) == {"-": "not again"}


def test_a_bug_with_which_tests_do_not_begin_is_caught(tmp_path):
    root = a_tree(tmp_path, "def test_any(): pass\n")
    (root / "conftest.py").write_text("import sums\nassert sums.add(1, 1) == 2\n")
    assert (
        planted.noticed(Bug("-", "sums.py", "a + b", "a - b", ["test_sums.py"]), root, tmp_path / "cache") == "conftest"
    )


def test_a_test_that_fails_without_the_bug_too_catches_nothing(tmp_path):
    root = a_tree(tmp_path, "def test_any(): assert False\n")
    with pytest.raises(RuntimeError, match="test_sums.py::test_any fails without it too"):
        planted.noticed(Bug("-", "sums.py", "a + b", "a - b", ["test_sums.py"]), root, tmp_path / "cache")


def test_tests_that_do_not_end_are_named_apart_and_looked_at_again_with_more_time(tmp_path, capsys):
    root = a_tree(tmp_path, "import time\ndef test_any(): time.sleep(60)\n")
    bug = Bug("-", "sums.py", "a + b", "a - b", ["test_sums.py"])
    hunt = lambda seconds: planted.hunt([bug], root, tmp_path / "cache", 1, seconds)
    assert hunt(1) == {"-": "no end within 1 seconds"}
    assert capsys.readouterr().out == "HUNG      -: no end within 1 seconds\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted, "noticed", lambda *_: "")
        assert hunt(1) != hunt(2) == {"-": ""}


def test_a_mutant_with_which_all_tests_of_a_package_do_not_end_is_not_noticed(monkeypatch):
    asked, near, far = [], {"near": "a test"}, {"far": "a test", "slow": f"{planted.NO_END}9 seconds"}

    def hunt(bugs, root, cache, jobs, seconds):
        asked.append(seconds)
        return {bug.name: (near if len(asked) == 1 else far).get(bug.name, "") for bug in bugs}

    monkeypatch.setattr(mutants, "hunt", hunt)
    bugs = [Bug(name, "tpu/mesh.py", "", "", []) for name in ("near", "far", "slow", "none")]
    assert [bug.name for bug in mutants.survivors_of(bugs, jobs=1)] == ["slow", "none"]
    assert asked[1] > asked[0] == planted.SECONDS


def test_below_95_percent_is_status_1(monkeypatch, capsys):
    for caught, status in ((19, 0), (18, 1)):
        found = {str(number): "a test" if number < caught else "" for number in range(20)}
        monkeypatch.setattr(planted, "hunt", lambda *_, found=found: found)
        assert planted.main([]) == status
        assert f"{caught} of 20 caught, {caught / 20:.1%}" in capsys.readouterr().out
