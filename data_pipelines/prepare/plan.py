"""The plan: which text goes to which part of a corpus. It is stored as JSON, so all processes read the same plan. Each
time text is added, its plan stays in OUT/plans/HASH.json, so that no file is added a second time."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.formats.source import Other, Range, Source
from data_pipelines.formats.values import CODE
from data_pipelines.prepare.options import MIB, sources_of

SAID = 3  # files to name in an error
KNOWN = "files left out that the corpus has already"


class Plan(NamedTuple):
    """parts: the units of work of each part; a unit is a tuple of ranges.   first: the number of the first part
    (--append: how many parts the corpus has).   problems: what was left out when files were listed."""

    parts: tuple[tuple[tuple[Range, ...], ...], ...]
    first: int = 0
    problems: dict = {}

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.parts))

    def units(self, number: int) -> tuple[tuple[Range, ...], ...]:
        return self.parts[number - self.first]

    def size(self, number: int) -> int:
        """Return the bytes of text in a part."""
        return sum(map(size, self.units(number)))

    def ranges(self) -> Iterable[Range]:
        return itertools.chain.from_iterable(itertools.chain.from_iterable(self.parts))

    def files(self) -> dict[str, str]:
        """Return path -> version, which changes with the file's content."""
        both = ((file.path, file.version) for piece in self.ranges() for file in (piece, piece.other) if file)
        return dict(both)

    @property
    def hash(self) -> str:
        """Hash of the text, whatever the numbers of its parts."""
        return hashlib.sha256(json.dumps(self.parts).encode()).hexdigest()


def of_json(stored: dict) -> Plan:
    """Return the plan whose `_asdict` was stored as JSON."""
    piece = lambda values: Range(*values[:-1], values[-1] and Other(*values[-1]))
    parts = tuple(tuple(tuple(map(piece, unit)) for unit in part) for part in stored["parts"])
    return Plan(parts, stored["first"], stored["problems"])


def size(unit: tuple[Range, ...]) -> int:
    return sum(piece.size for piece in unit)


def cut(units: list[tuple[Range, ...]], part_size: int, first: int = 0, problems: dict | None = None) -> Plan:
    """Divide units into parts of about `part_size` MiB, each of which begins with a document unless one fills it."""
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
    """Return which files differ, as 'a.txt has changed, b.txt is gone'; '' if none does."""
    differing = [f"{path} is gone" for path in before if path not in now]
    differing += [f"{path} has changed" for path in before if path in now and before[path] != now[path]]
    differing += [f"{path} is new" for path in now if path not in before]
    more = f" and {len(differing) - SAID} more" if len(differing) > SAID else ""
    return ", ".join(differing[:SAID]) + more


def kept_at(out: Path, plan_hash: str) -> Path:
    """Return where a plan is stored."""
    return out / "plans" / f"{plan_hash[:16]}.json"


def _known(out: Path, manifest: dict) -> dict[tuple, dict[str, tuple]]:
    """Return the files whose text a corpus has: (path, how it was read) -> {text before its documents: version}."""
    found = {}
    for stage in manifest["stages"]:
        place = kept_at(out, stage["plan"])
        if not cloud.is_file(place):
            raise UserError(f"--append: {place}, the list of the corpus's files, is missing; copy the corpus again")
        sources = sources_of(stage["settings"])
        for piece in of_json(json.loads(place.read_bytes())).ranges():
            found.setdefault(_key(piece, sources), {})[_codes(sources[piece.source])] = _version(piece)
    return found


def check_once(units: list[tuple[Range, ...]], sources: Sequence[Source]) -> None:
    """Raise UserError if two sources of one kind have the same file, whose text would be stored twice."""
    found: dict[tuple[str, str], Source] = {}
    for piece in itertools.chain.from_iterable(units if len(sources) > 1 else ()):
        source = sources[piece.source]
        first = found.setdefault((_place(piece, source), source.kind), source)
        if first is not source:
            raise UserError(
                f"--source {source}: {printable(piece.path)} is also in --source {first}, and its text would be stored "
                "twice; leave one of them out, or give patterns that share no file"
            )


def new(
    units: list[tuple[Range, ...]], sources: Sequence[Source], out: Path, manifest: dict, problems: Problems
) -> list[tuple[Range, ...]]:
    """Return the units without the files that a corpus has, which are counted as a problem. Raises UserError for a file
    that has changed since it was added, or that would now get another text or code before its documents."""
    before, kept, seen = _known(out, manifest), [], set()
    for unit in units:
        fresh = []
        for piece in unit:
            file, codes = before.get(_key(piece, sources)), _codes(sources[piece.source])
            if file is None:
                fresh.append(piece)
            elif _version(piece) not in file.values():
                raise UserError(f"--append: {printable(piece.path)} has changed since it was added; give new files")
            elif codes not in file:
                raise UserError(
                    f"--append: {printable(piece.path)} is already in the corpus, with {' and '.join(sorted(file))} "
                    f"and not with {codes}; leave it out, or give the same options"
                )
            else:
                seen.add(piece.path)
        kept += [tuple(fresh)] if fresh else []
    for path in sorted(seen):
        problems.note(KNOWN, path)
    return kept


def _key(piece: Range, sources: Sequence[Source]) -> tuple:
    """Identify a file, however its path is written, and how it is read."""
    source = sources[piece.source]
    return _place(piece, source), source.kind, source.options, source.language


def _place(piece: Range, source: Source) -> str:
    local = source.kind != "tfds" and not cloud.is_remote(piece.path)
    return os.path.realpath(piece.path) if local else piece.path


def _codes(source: Source) -> str:
    """Return what is put before a source's documents, as options."""
    code = next((value for value in source.values if value.name == CODE), None)
    before = f" and --task-prefix {source.task_prefix!r}" if source.task_prefix else ""
    if code is None:
        return f"no --code{before}"
    return (f"--code-field {code.field}" if code.field else f"--code {code.known[0]}") + before


def _version(piece: Range) -> tuple[str, ...]:
    return piece.version, *([piece.other.version] if piece.other else [])
