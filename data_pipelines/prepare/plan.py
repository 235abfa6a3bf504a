"""Which text goes to which part of a corpus: a value that travels as JSON and that every process reads alike."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from typing import NamedTuple

from data_pipelines.formats.source import Other, Range
from data_pipelines.prepare.options import MIB

SAID = 3  # files that an error names


class Plan(NamedTuple):
    """parts: of each its units of work, of each its ranges.   first: the number of the first part (--append: how many
    the corpus has already).   problems: what was left out when files were listed."""

    parts: tuple[tuple[tuple[Range, ...], ...], ...]
    first: int = 0
    problems: dict = {}

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.parts))

    def units(self, number: int) -> tuple[tuple[Range, ...], ...]:
        return self.parts[number - self.first]

    def size(self, number: int) -> int:
        """Bytes of text."""
        return sum(map(size, self.units(number)))

    def ranges(self) -> Iterable[Range]:
        return itertools.chain.from_iterable(itertools.chain.from_iterable(self.parts))

    def files(self) -> dict[str, str]:
        """Path -> what tells this content of the file from another."""
        both = ((one.path, one.version) for piece in self.ranges() for one in (piece, piece.other) if one)
        return dict(both)

    @property
    def hash(self) -> str:
        """Of the text, wherever its parts go."""
        return hashlib.sha256(json.dumps(self.parts).encode()).hexdigest()


def of_json(said: dict) -> Plan:
    """The plan whose `_asdict` JSON has kept."""
    parts = tuple(tuple(tuple(map(_range, unit)) for unit in part) for part in said["parts"])
    return Plan(parts, said["first"], said["problems"])


def _range(said: list) -> Range:
    *plain, other = said
    return Range(*plain, other and Other(*other))


def size(unit: tuple[Range, ...]) -> int:
    return sum(piece.size for piece in unit)


def cut(units: list[tuple[Range, ...]], part_size: int, first: int = 0, problems: dict | None = None) -> Plan:
    """Parts of about `part_size` MiB, all about equal, that begin where a document does unless one fills a part."""
    total = sum(map(size, units))
    number = max(1, round(total / (part_size * MIB)))
    parts: list[list[tuple[Range, ...]]] = []
    filled = done = 0
    for unit in units:
        full = parts and done * number >= total * len(parts)
        if not parts or full and (not unit[0].continues or filled >= 2 * total / number):
            parts.append([])
            filled = 0
        parts[-1].append(unit)
        filled, done = filled + size(unit), done + size(unit)
    return Plan(tuple(map(tuple, parts)), first, problems or {})


def changed(before: dict[str, str], now: dict[str, str]) -> str:
    """Which files are not what they were, '' where all are: 'a.txt has changed, b.txt is gone'."""
    said = [f"{path} is gone" for path in before if path not in now]
    said += [f"{path} has changed" for path in before if path in now and before[path] != now[path]]
    said += [f"{path} is new" for path in now if path not in before]
    more = f" and {len(said) - SAID} more" if len(said) > SAID else ""
    return ", ".join(said[:SAID]) + more
