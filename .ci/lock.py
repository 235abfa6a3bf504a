"""Write constraints.txt: the versions that this environment has, for Pythons of its line; the other line's stay.

What accelerators need beyond that is resolved, not installed.   Run by `make lock`.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

LOCK = Path(__file__).parents[1] / "constraints.txt"
LINES = '; python_version < "3.12"', '; python_version >= "3.12"'  # as requirements.txt pairs JAX and Flax
HEAD = "# Tested versions, for set-up and launch: written by `make lock` in an environment of each line of Pythons.\n"
ACCELERATORS = ["jax[tpu]", "jax[cuda12]"]
TOOLS = ("pip", "setuptools", "wheel")
TORCH = re.compile(r"(cuda-|nvidia-|triton)(?!.*-cu12$)")  # PyTorch, which the tests alone use, names its own


def here() -> dict[str, str]:
    """Canonical name -> version."""
    resolve = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *ACCELERATORS]
    report = json.loads(subprocess.run(resolve, check=True, stdout=subprocess.PIPE).stdout)
    more = [(found["metadata"]["name"], found["metadata"]["version"]) for found in report["install"]]
    own = [(found.name, found.version) for found in distributions() if not TORCH.match(canonical(found.name))]
    both = {canonical(name): version.partition("+")[0] for name, version in own + more}
    return {name: version for name, version in both.items() if name not in TOOLS}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read() -> list[dict[str, str]]:
    """The versions of each line of Pythons."""
    entries = [line for line in LOCK.read_text().splitlines() if line[:1] not in ("", "#")] if LOCK.exists() else []
    versions = [{}, {}]
    for entry in entries:
        pinned, semicolon, marker = entry.partition(";")
        for line, locked in zip(LINES, versions, strict=True):
            if semicolon + marker in ("", line):
                name, _, version = pinned.partition("==")
                locked[name] = version
    return versions


def write(versions: list[dict[str, str]]) -> None:
    older, newer = versions
    entries = []
    for name in sorted(older | newer):
        if older.get(name) == newer.get(name):
            entries.append(f"{name}=={older[name]}")
        else:
            entries += [f"{name}=={v[name]}{line}" for line, v in zip(LINES, versions, strict=True) if name in v]
    LOCK.write_text(HEAD + "\n".join(entries) + "\n")


if __name__ == "__main__":
    locked = read()
    locked[sys.version_info >= (3, 12)] = here()
    write(locked)
