"""What else a corpus's content depends on: the libraries that cut and tokenise, what they know of Unicode, and the
versions of the steps that change text."""

import unicodedata
from collections.abc import Iterable
from importlib.metadata import version

from data_pipelines.text.steps import check_steps

LIBRARIES = ("tokenizers", "sentencepiece", "sentencex")


def versions(steps: Iterable[str] = ()) -> dict[str, str]:
    """Library, or 'step NAME' -> version, here."""
    found = {name: version(name) for name in LIBRARIES} | {"Unicode": unicodedata.unidata_version}
    return found | {f"step {name}": str(number) for name, number in check_steps(steps)}


def differences(before: dict[str, str], now: dict[str, str], start: str = "") -> list[str]:
    """'tokenizers was 0.22.1 and is 0.23.3', of those whose names start so."""
    changed = [name for name in now if name.startswith(start) and before.get(name) != now[name]]
    return [f"{name} was {before.get(name)} and is {now[name]}" for name in changed]


def cure(before: dict[str, str], now: dict[str, str]) -> str:
    """The pip command that brings the libraries back; what else has changed came with Python or this program."""
    named = [f"{name}=={before[name]}" for name in LIBRARIES if before.get(name, now[name]) != now[name]]
    return f"pip install {' '.join(named)}" if named else "use the Python and the commit of then"
