"""Versions of what a run's numbers depend on: resuming is bit-exact only where they are the same."""

import platform
import re
from importlib import metadata
from pathlib import Path

from tpu.commit import commit

ROOT = Path(__file__).parents[2]
# Not in requirements.txt, but installed with its packages or for an accelerator or gs://
MORE = "jaxlib", "libtpu", "jax-cuda12-plugin", "tensorstore", "gcsfs"


def versions() -> dict[str, str | None]:
    """Of Python, of every package that requirements.txt names and is installed, and of this code, which is a commit."""
    found = {"code": commit(ROOT), "python": platform.python_version()}
    for name in (*_required(), *MORE):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def changed(before: dict[str, str | None], now: dict[str, str | None]) -> str | None:
    """One line: what has another version than at the last start."""
    differ = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    changes = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in differ)
    return f"since the last start: {changes}; from here on not bit for bit as before" if differ else None


def _required() -> list[str]:
    """Names of the packages that this one needs at run time."""
    file = ROOT / "requirements.txt"  # of the source folder; where this is installed, of its metadata
    lines = file.read_text().splitlines() if file.exists() else metadata.requires("pretrain")
    names = [re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line]
    return list(dict.fromkeys(name[0] for name in names if name))
