"""A test file of the second tier runs again when something that it reaches has changed, and only then."""

import pytest

from tests import second_tier


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small repository: two families, a registry, a module that a process is started with."""
    files = {
        "models/families/registry.py": "from models.families import bert, xlnet\n",
        "models/families/bert.py": "from models.blocks.norm import Norm\n",
        "models/families/xlnet.py": "",
        "models/blocks/norm.py": "",
        "models/blocks/unused.py": "",
        "program.py": "",
        "tpu/colab.ipynb": "{}",
        "tests/test_it.py": "def f():\n    import models.families.registry\n",
        "constraints.txt": "jax==1\n",
        "tests/conftest.py": "",
        "models/blocks/norm.json": "{}",
        "models/families/bert/sizes.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(second_tier, "ROOT", tmp_path)
    monkeypatch.setattr(second_tier, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(second_tier, "REGISTRY", tmp_path / "models/families/registry.py")
    monkeypatch.setattr(second_tier, "VERSIONS", tmp_path / "constraints.txt")
    second_tier.imports.cache_clear()
    yield tmp_path
    second_tier.imports.cache_clear()


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        (None, False),
        ("models/blocks/unused.py", False),
        ("models/families/xlnet.py", False),
        ("models/families/bert.py", True),
        ("models/blocks/norm.py", True),
        ("program.py", True),
        ("tpu/colab.ipynb", True),
        ("tests/test_it.py", True),
        ("constraints.txt", True),
        ("tests/conftest.py", True),
        ("models/blocks/norm.json", True),
        ("models/families/bert/sizes.json", True),
    ],
)
def test_a_file_runs_again_for_what_it_reaches(tree, changed, runs):
    file, of = tree / "tests/test_it.py", (("bert",), ("program", "tpu/colab.ipynb"))
    assert not second_tier.unchanged(file, *of)
    second_tier.record({file: second_tier.fingerprint(file, *of)})
    if changed:
        (tree / changed).write_text((tree / changed).read_text() + "# changed\n")
        second_tier.imports.cache_clear()
    assert second_tier.unchanged(file, *of) != runs


def test_without_names_every_family_counts(tree):
    file = tree / "tests/test_it.py"
    second_tier.record({file: second_tier.fingerprint(file, (), ())})
    (tree / "models/families/xlnet.py").write_text("# changed\n")
    assert not second_tier.unchanged(file, (), ())


def test_a_start_that_is_not_there_is_an_error(tree):
    with pytest.raises(ValueError, match="test_it.py: .* names programme, which is not there"):
        second_tier.fingerprint(tree / "tests/test_it.py", (), ("programme",))
