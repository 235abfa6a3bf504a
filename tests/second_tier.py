"""Test files that `make test` runs only where the code that they reach has changed since they last passed.

A file joins by `pytestmark = pytest.mark.second_tier(*families, starts=[...])`: it is then judged by all that it
imports and that `starts` import, modules that it has other processes run, or other files. Of the registry's families
only the named ones count, none for all. What passes with `--both-tiers`, as under `make test-all`, is recorded in
second_tier.json, for the next commit.
"""

import ast
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_suffix(".json")
REGISTRY = ROOT / "models" / "families" / "registry.py"
VERSIONS = ROOT / "constraints.txt"


def unchanged(file: Path, families: Iterable[str], starts: Iterable[str]) -> bool:
    """Whether a test file passed with all that it reaches as it is."""
    return recorded().get(_name(file)) == fingerprint(file, tuple(families), tuple(starts))


def recorded() -> dict[str, str]:
    """Test file -> the fingerprint with which it passed."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def record(passed: dict[Path, str]) -> None:
    """Add files that passed, by their fingerprints."""
    both = recorded() | {_name(file): found for file, found in passed.items()}
    RECORD.write_text(json.dumps(dict(sorted(both.items())), indent=1) + "\n")


def fingerprint(file: Path, families: tuple[str, ...], starts: tuple[str, ...]) -> str:
    """Hash of every file of this repository that a test file reaches, and of the packages' versions."""
    if unknown := [start for start in starts if _file(start) is None]:
        raise ValueError(f"{_name(file)}: second_tier(starts=[...]) names {', '.join(unknown)}, which is not there")
    reached: set[Path] = set()
    conftests = [folder / "conftest.py" for folder in file.parents if ROOT in (folder, *folder.parents)]
    waiting = [file, *map(_file, starts), *(path for path in conftests if path.is_file())]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            named = {_file(f"models.families.{family.replace('-', '_')}") for family in families}
            waiting += named if path == REGISTRY and families else imports(path)
    digest = hashlib.sha256()
    for path in sorted(reached.union({VERSIONS}, *map(_data, reached)) - {RECORD}):
        digest.update(_name(path).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def imports(file: Path) -> frozenset[Path]:
    """Files of this repository that a Python file imports, anywhere in it."""
    if file.suffix != ".py":
        return frozenset()
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(filter(None, map(_file, names)))


def _data(file: Path) -> set[Path]:
    """What a module reads: files of its name beside it, or in a folder of its name."""
    beside = {path for path in file.parent.glob(f"{file.stem}.*") if path != file and path.is_file()}
    return beside | {path for path in file.with_suffix("").glob("*") if path.is_file() and path.suffix != ".py"}


def _file(module: str) -> Path | None:
    path = ROOT / module if "/" in module else ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return path if path.is_file() else None


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()
