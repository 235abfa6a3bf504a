"""What else a corpus's content depends on: the libraries that cut and tokenise, and what they know of Unicode."""

import unicodedata
from importlib.metadata import version

LIBRARIES = ("tokenizers", "sentencepiece", "sentencex")


def versions() -> dict[str, str]:
    """Library -> version, here."""
    return {name: version(name) for name in LIBRARIES} | {"Unicode": unicodedata.unidata_version}


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """'tokenizers was 0.22.1 and is 0.23.3'"""
    return [f"{name} was {before.get(name)} and is {now.get(name)}" for name in now if before.get(name) != now[name]]


def cure(before: dict[str, str]) -> str:
    """The pip command that brings the libraries back."""
    return "pip install " + " ".join(f"{name}=={before[name]}" for name in LIBRARIES if name in before)
