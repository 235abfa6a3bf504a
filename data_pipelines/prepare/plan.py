"""Which text goes to which part of a corpus: a value that travels as JSON and that every process reads alike. Those of
each time that text was added stay beside the corpus, in OUT/plans/HASH.json, so that no file is added a second time."""

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

SAID = 3  # files that an error names
KNOWN = "files left out that the corpus has already"


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
    piece = lambda values: Range(*values[:-1], values[-1] and Other(*values[-1]))
    parts = tuple(tuple(tuple(map(piece, unit)) for unit in part) for part in said["parts"])
    return Plan(parts, said["first"], said["problems"])


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


def kept_at(out: Path, plan_hash: str) -> Path:
    """Where a plan stays."""
    return out / "plans" / f"{plan_hash[:16]}.json"


def _known(out: Path, manifest: dict) -> dict[tuple, dict[str, tuple]]:
    """(path, how it was read) of files whose text a corpus has -> {what was put before its documents: version}."""
    found = {}
    for stage in manifest["stages"]:
        place = kept_at(out, stage["plan"])
        if not cloud.is_file(place):
            raise UserError(f"--append: {place} is missing, which says what the corpus has; copy the corpus again")
        sources = sources_of(stage["settings"])
        for piece in of_json(json.loads(place.read_bytes())).ranges():
            found.setdefault(_key(piece, sources), {})[_codes(sources[piece.source])] = _version(piece)
    return found


def check_once(units: list[tuple[Range, ...]], sources: Sequence[Source]) -> None:
    """UserError where two sources of one kind have the same file, whose text would be stored twice."""
    found: dict[tuple[str, str], Source] = {}
    for piece in itertools.chain.from_iterable(units if len(sources) > 1 else ()):
        source = sources[piece.source]
        first = found.setdefault((_place(piece, source), source.kind), source)
        if first is not source:
            raise UserError(
                f"--source {source}: {printable(piece.path)} is of --source {first}, too, and its text would be stored "
                "twice; leave one of them out, or give patterns without files in common"
            )


def new(
    units: list[tuple[Range, ...]], sources: Sequence[Source], out: Path, manifest: dict, problems: Problems
) -> list[tuple[Range, ...]]:
    """What a corpus does not have yet; the rest is counted. UserError for a file that has changed since then, or is to
    have another text or code before its documents."""
    before, kept, seen = _known(out, manifest), [], set()
    for unit in units:
        fresh = []
        for piece in unit:
            file, codes = before.get(_key(piece, sources)), _codes(sources[piece.source])
            if file is None:
                fresh.append(piece)
            elif _version(piece) not in file.values():
                raise UserError(
                    f"--append: {printable(piece.path)} has changed since its text was added, which would be stored "
                    "twice; name files that are new"
                )
            elif codes not in file:
                raise UserError(
                    f"--append: {printable(piece.path)} is in already, with {' and '.join(sorted(file))} and not "
                    f"with {codes}; leave it out, or give the same"
                )
            else:
                seen.add(piece.path)
        kept += [tuple(fresh)] if fresh else []
    for path in sorted(seen):
        problems.note(KNOWN, path)
    return kept


def _key(piece: Range, sources: Sequence[Source]) -> tuple:
    """A file, however its path is written, and how it is read."""
    source = sources[piece.source]
    return _place(piece, source), source.kind, source.options, source.language


def _place(piece: Range, source: Source) -> str:
    local = source.kind != "tfds" and not cloud.is_remote(piece.path)
    return os.path.realpath(piece.path) if local else piece.path


def _codes(source: Source) -> str:
    """What is put before a source's documents, as options."""
    code = next((value for value in source.values if value.name == CODE), None)
    before = f" and --task-prefix {source.task_prefix!r}" if source.task_prefix else ""
    if code is None:
        return f"no --code{before}"
    return (f"--code-field {code.field}" if code.field else f"--code {code.known[0]}") + before


def _version(piece: Range) -> tuple[str, ...]:
    return piece.version, *([piece.other.version] if piece.other else [])
