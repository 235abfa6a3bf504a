"""Imports point one way, between packages and between the rooms of one; and nothing heavy or foreign at run time."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pretrain", "finetune", "models", "data_pipelines", "tpu")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
FAMILIES = sorted((ROOT / "models" / "families").glob("[a-z]*.py"))
# What the files of a package never import; a package's __main__.py may import pretrain, in the function that needs it.
FORBIDDEN = {
    "models": {"pretrain", "finetune", "data_pipelines", "tpu"},
    "data_pipelines": {"pretrain", "finetune", "models", "tpu", "jax", "jaxlib", "flax", "optax", "orbax"},
    "tpu": {"pretrain", "finetune"},
    "pretrain": {"finetune"},
    "finetune": set(),
}
NEVER = {"torch", "transformers", "tensorflow", "datasets", "tests", "benchmarks"}


def imported(tree, everywhere=True):
    """Top-level names of the modules that a file imports; everywhere=False: leave out imports in functions."""
    names, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "absolute imports only"
            names.add(node.module.split(".")[0])
        if everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return names


def violations(package, name, source):
    """What a file may not import."""
    tree, forbidden = ast.parse(source), FORBIDDEN[package]
    if name == "__main__.py":
        return (imported(tree) & (NEVER | forbidden - {"pretrain"})) | (imported(tree, everywhere=False) & forbidden)
    return imported(tree) & (NEVER | forbidden)


def test_a_file_imports_only_what_its_package_may():
    assert len(FILES) > 50 and {file.relative_to(ROOT).parts[0] for file in FILES} == set(PACKAGES)
    found = {file: violations(file.relative_to(ROOT).parts[0], file.name, file.read_text()) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "package, name, source, found",
    [
        ("models", "bert.py", "from data_pipelines.corpus import Corpus", {"data_pipelines"}),
        ("data_pipelines", "__main__.py", "def f():\n    from pretrain.recipe import resolve", set()),
        ("data_pipelines", "__main__.py", "from pretrain.recipe import resolve", {"pretrain"}),
        ("data_pipelines", "__main__.py", "def f():\n    import models.families.bert", {"models"}),
        ("tpu", "mesh.py", "import pretrain", {"pretrain"}),
        ("pretrain", "run.py", "def f():\n    import torch", {"torch"}),
    ],
)
def test_the_rules_themselves(package, name, source, found):
    assert violations(package, name, source) == found


# Rooms from what stands highest: a file imports from its own and from those after it. '' are the files beside them.
ROOMS = {
    "models": ("families", "attention", "blocks", "core"),
    "pretrain": ("commands", "recipes", "training", "storage", "", "objectives", "optimizers", "schedules")
    + ("huggingface", "json_values"),
}


def room_of(package, module):
    """Of a dotted module below a package: its room, None for the package's program."""
    rest = module.split(".")[1:]
    if rest[0] in ROOMS[package]:
        return rest[0]
    return None if rest[0] == "__main__" else ""


def upward(package, module, source):
    """The modules of the package that a file imports although they stand above it."""
    rooms, own = ROOMS[package], room_of(package, module)
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == package and "." in node.module:
            theirs = room_of(package, node.module)
            if own is not None and theirs is not None and rooms.index(theirs) < rooms.index(own):
                found.add(node.module)
    return found


def test_a_room_imports_from_those_below_it():
    paths = [path for path in (file.relative_to(ROOT) for file in FILES) if path.parts[0] in ROOMS]
    read = lambda path: (path.parts[0], ".".join(path.with_suffix("").parts), (ROOT / path).read_text())
    assert {path: names for path in paths if (names := upward(*read(path)))} == {}
    assert upward("pretrain", "pretrain.recipe", "from pretrain.training.run import run") == {"pretrain.training.run"}
    assert not upward("pretrain", "pretrain.training.loop", "from pretrain.storage.journal import Journal")
    assert not upward("pretrain", "pretrain.__main__", "from pretrain.training.run import run")


def families_imported(source):
    """The family files that another file's source imports."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names} | {node.module for node in nodes}
    return names & {f"models.families.{file.stem}" for file in FAMILIES}


def test_a_family_imports_no_other():
    assert [file.stem for file in FAMILIES if families_imported(file.read_text())] == []
    assert families_imported("from models.families.bert import Bert") == {"models.families.bert"}
    assert families_imported("from models.families import bert") == {"models.families.bert"}


def blocks_of_ten(source):
    """Every ten lines of code in a row, but for imports and blank lines."""
    tree = ast.parse(source)
    imported = [range(node.lineno, node.end_lineno + 1) for node in tree.body if isinstance(node, ast.ImportFrom)]
    left_out = set(itertools.chain(*imported))
    numbered = enumerate(source.splitlines(), 1)
    lines = [line.strip() for number, line in numbered if line.strip() and number not in left_out]
    return {tuple(lines[at : at + 10]) for at in range(len(lines) - 9)}


def test_two_families_share_no_ten_lines():
    blocks = [blocks_of_ten(file.read_text()) for file in FAMILIES]
    assert all(not (one & other) for one, other in itertools.combinations(blocks, 2))
    ten = "\n".join(f"line_{number} = {number}" for number in range(10))
    assert blocks_of_ten(f"from a import b\n\n{ten}") == blocks_of_ten(ten) != set()
