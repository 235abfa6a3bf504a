"""Plant the bugs of `planted.toml` one at a time, each in a copy of the tree, and see whether the nearest tests fail.

    python -m tests.planted [--only NAME] [--jobs 2]

To be run where the tests pass. Status 1: fewer than 95% were caught. What was seen of a bug is kept, and looked for
again only when the bug, its file or its tests have changed.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".toml")
WANTED = 0.95  # share of the bugs that are caught
SECONDS = 900  # for the tests of one bug, many times what they take: past it, it hangs them and counts as caught
NO_END = "no end within "  # begins what stands for a test where the tests did not end
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "corpora", "runs", "hf")


class Bug(NamedTuple):
    """One line of a file as it would be with a mistake. tests: files that should notice, those nearest to it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def read(table: Path = TABLE) -> list[Bug]:
    return [Bug(**entry) for entry in tomllib.loads(table.read_text())["bug"]]


def noticed(bug: Bug, root: Path, cache: Path, seconds: int = SECONDS) -> str:
    """The first test that fails with the bug in a copy of the tree, '' when all pass, or NO_END."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=LEFT_OUT)
        file = copy / bug.file
        before = file.read_text()
        file.write_text(before.replace(bug.old, bug.new, 1))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", f"cache_dir={cache}"]
        as_written = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # its cache takes two of one second for one
        streams = {"capture_output": True, "text": True, "timeout": seconds}
        ask = lambda *tests: subprocess.run([*command, *tests], cwd=copy, env=as_written, **streams)
        try:
            done = ask(*bug.tests)
        except subprocess.TimeoutExpired:
            return f"{NO_END}{seconds} seconds"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        unread = re.search(r"^ImportError while loading (conftest) '", done.stderr, re.MULTILINE)
        if done.returncode not in (0, 1, 2) and not unread:  # all pass, some fail, what cannot be imported
            raise RuntimeError(f"{bug.name}: pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        if not (by := failed or unread):
            return ""
        file.write_text(before)
        if ask(*(bug.tests if unread else [by[1]])).returncode:
            raise RuntimeError(f"{bug.name}: {by[1]} fails without it too: mend that first")
        return by[1]


def digest(bug: Bug, root: Path) -> str:
    """Of what decides whether the bug is caught, as far as it is near."""
    texts = [(root / file).read_text() for file in (bug.file, *bug.tests)]
    return hashlib.sha256(json.dumps([bug, texts]).encode()).hexdigest()


def hunt(bugs: list[Bug], root: Path, cache: Path, jobs: int, seconds: int = SECONDS) -> dict[str, str]:
    """Name -> test that caught it, '' or NO_END; printed one by one and kept in the cache folder."""
    kept = cache / "planted"
    kept.mkdir(parents=True, exist_ok=True)

    def look(bug: Bug) -> str:
        place = kept / digest(bug, root)
        before = place.read_text() if place.is_file() else None
        if before is None or before.startswith(NO_END) and before != f"{NO_END}{seconds} seconds":
            temporary = place.with_suffix(f".{os.getpid()}")
            temporary.write_text(noticed(bug, root, cache, seconds))
            temporary.replace(place)
        by = place.read_text()
        said = "HUNG    " if by.startswith(NO_END) else "caught  " if by else "SURVIVED"
        print(f"{said}  {bug.name}: {by}" if by else f"{said}  {bug.name} ({bug.file})", flush=True)
        return by

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip([bug.name for bug in bugs], pool.map(look, bugs), strict=True))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="bugs whose name, file or tests contain this")
    parser.add_argument("--jobs", type=int, default=1, help="bugs that are looked for at the same time")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in read() if (options.only or "") in " ".join((bug.name, bug.file, *bug.tests))]
    found = hunt(bugs, ROOT, ROOT / ".pytest_cache", options.jobs)
    caught = sum(by != "" for by in found.values())
    print(f"{caught} of {len(found)} caught, {caught / max(len(found), 1):.1%}")
    return int(caught < WANTED * len(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
