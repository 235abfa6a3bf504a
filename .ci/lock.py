"""Write constraints.txt: the versions that this environment has, for Pythons of its line; the other line's stay.

What accelerators need beyond that is resolved, not installed; so is constraints-beam.txt.   Run by `make lock`.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK, BEAM_LOCK = ROOT / "constraints.txt", ROOT / "constraints-beam.txt"
LINES = '; python_version < "3.12"', '; python_version >= "3.12"'  # as requirements.txt pairs JAX and Flax
HEAD = "# Tested versions, for set-up and launch: written by `make lock` in an environment of each line of Pythons.\n"
BEAM_HEAD = "# As constraints.txt, for `make setup-beam`.\n"
SAME = ("tokenizers", "sentencepiece", "sentencex")  # a corpus's content depends on them, hence alike in both locks
ACCELERATORS = ["jax[tpu]", "jax[cuda12]"]
TOOLS = ("pip", "setuptools", "wheel")
TORCH = re.compile(r"(cuda-|nvidia-|triton)(?!.*-cu12$)")  # PyTorch, which the tests alone use, names its own


def here() -> dict[str, str]:
    """Canonical name -> version."""
    more = resolved(*ACCELERATORS)
    own = [(found.name, found.version) for found in distributions() if not TORCH.match(canonical(found.name))]
    both = {canonical(name): version.partition("+")[0] for name, version in own + more}
    return {name: version for name, version in both.items() if name not in TOOLS}


def resolved(*wanted: str) -> list[tuple[str, str]]:
    """(name, version) of what pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *wanted]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return [(found["metadata"]["name"], found["metadata"]["version"]) for found in report["install"]]


def for_beam(versions: dict[str, str]) -> dict[str, str]:
    """Canonical name -> version of Beam's environment, beside this one of the given versions."""
    same = [f"{name}=={versions[name]}" for name in SAME]
    found = resolved("--ignore-installed", "-r", str(ROOT / "requirements-beam.txt"), *same)
    return {canonical(name): version for name, version in found if canonical(name) not in TOOLS}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read(lock: Path) -> list[dict[str, str]]:
    """The versions of each line of Pythons."""
    entries = [line for line in lock.read_text().splitlines() if line[:1] not in ("", "#")] if lock.exists() else []
    versions = [{}, {}]
    for entry in entries:
        pinned, semicolon, marker = entry.partition(";")
        for line, locked in zip(LINES, versions, strict=True):
            if semicolon + marker in ("", line):
                name, _, version = pinned.partition("==")
                locked[name] = version
    return versions


def write(lock: Path, head: str, versions: list[dict[str, str]]) -> None:
    older, newer = versions
    entries = []
    for name in sorted(older | newer):
        if older.get(name) == newer.get(name):
            entries.append(f"{name}=={older[name]}")
        else:
            entries += [f"{name}=={v[name]}{line}" for line, v in zip(LINES, versions, strict=True) if name in v]
    lock.write_text(head + "\n".join(entries) + "\n")


if __name__ == "__main__":
    line = sys.version_info >= (3, 12)
    versions = here()
    for lock, head, found in ((LOCK, HEAD, versions), (BEAM_LOCK, BEAM_HEAD, for_beam(versions))):
        locked = read(lock)
        locked[line] = found
        write(lock, head, locked)
