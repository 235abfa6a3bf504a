"""Change one random operator, number or condition of the product at a time, and see whether a test notices.

    python -m tests.mutants [--number 100] [--seed 0] [--jobs 2]

Each mutant is planted like the bugs of `planted.toml`, and kept like them: a run that was ended goes on. Its tests are
the files that import its module, the most specific first; of one that survives them all tests of its package. What
survives those too is printed, and that with which they did not end: they take so long that this may say nothing of it.
"""

import argparse
import ast
import difflib
import functools
import random
import sys
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.planted import NO_END, ROOT, SECONDS, Bug, hunt

PACKAGES = ("models", "data_pipelines", "pretrain", "tpu")
# `|` stands in annotations, where a change is an error on import; the two of variables need to be told which.
LEFT_OUT = ("BitOr", "VariableReplacer", "VariableInserter", "RemoveDecorator")
MOST_TESTS = 8  # files for a mutant
PACKAGE_SECONDS = 4 * SECONDS  # for all tests of a package, in one process


def imported(file: Path) -> frozenset[str]:
    """The modules of this repository that a file imports, as dotted names; of `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@functools.cache
def importers() -> dict[Path, frozenset[str]]:
    """File of the product or the tests -> what it imports."""
    return {file: imported(file) for package in (*PACKAGES, "tests") for file in (ROOT / package).rglob("*.py")}


def nearest_tests(module: str) -> list[str]:
    """Test files that import a module, or else a module that does; first those that import little else."""
    users = [file for file, names in importers().items() if module in names]
    tests = sorted((file for file in users if file.name.startswith("test_")), key=lambda file: len(importers()[file]))
    if tests:
        return [str(file.relative_to(ROOT)) for file in tests[:MOST_TESTS]]
    above = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in users]
    return sorted({test for name in above for test in nearest_tests(name)})[:MOST_TESTS]


def places(source: str) -> dict[str, list[tuple[str, int]]]:
    """Kind of change -> each (operator, occurrence) of it in a file."""
    nodes, found = list(ast_nodes(get_ast(source))), {}
    for name in operator_names():
        if any(part in name for part in LEFT_OUT):
            continue
        number = sum(len(list(get_operator(name)().mutation_positions(node))) for node in nodes)
        found.setdefault(name.split("_")[0], []).extend((name, occurrence) for occurrence in range(number))
    return {kind: all_of_it for kind, all_of_it in found.items() if all_of_it}


def mutant(draw: random.Random) -> Bug:
    """A file drawn by its length, a kind of change that it has, and a place for it."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file.read_text())
    while True:
        (file,) = draw.choices(files, [file.read_text().count("\n") for file in files])
        source, module = file.read_text(), ".".join(file.relative_to(ROOT).with_suffix("").parts)
        kinds, tests = places(source), nearest_tests(module)
        if kinds and tests:
            operator, occurrence = draw.choice(kinds[draw.choice(sorted(kinds))])
            changed = mutate_code(source, get_operator(operator)(), occurrence)
            name = f"{file.relative_to(ROOT)} {operator.removeprefix('core/')} {occurrence}"
            return Bug(name, str(file.relative_to(ROOT)), source, changed, tests)


def of_package(file: str) -> list[str]:
    """All test files of the package that a file is in."""
    folder = ROOT / "tests" / file.partition("/")[0]
    return sorted(str(test.relative_to(ROOT)) for test in folder.rglob("test_*.py"))


def survivors_of(mutants: list[Bug], jobs: int) -> list[Bug]:
    """Those that no test noticed."""
    look = lambda bugs, seconds: hunt(bugs, ROOT, ROOT / ".pytest_cache", jobs, seconds)
    near = look(mutants, SECONDS)
    left = [bug._replace(tests=of_package(bug.file)) for bug in mutants if not near[bug.name]]
    far = look(left, PACKAGE_SECONDS)
    return [bug for bug in left if not far[bug.name] or far[bug.name].startswith(NO_END)]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are looked for at the same time")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    mutants = [mutant(draw) for _ in range(options.number)]
    survivors = survivors_of(mutants, options.jobs)
    for bug in survivors:
        print("".join(difflib.unified_diff(bug.old.splitlines(True), bug.new.splitlines(True), bug.name, "", n=1)))
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} noticed")


if __name__ == "__main__":
    main(sys.argv[1:])
