"""The times that text was added to a corpus. Their plans stay beside it, so that no file is added a second time.

OUT/plans/HASH.json
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.formats.source import Range, Source
from data_pipelines.prepare import plan as plans
from data_pipelines.prepare.options import sources_of

FOLDER = "plans"
KNOWN = "files left out that the corpus has already"


class Known(NamedTuple):
    """A file whose text a corpus has.   codes: how its documents were given theirs, as options."""

    version: tuple[str, ...]
    codes: set[str]


def name(plan_hash: str) -> str:
    return f"{plan_hash[:16]}.json"


def known(out: Path, manifest: dict) -> dict[tuple, Known]:
    """(path, how it was read) -> the files whose text a corpus has."""
    found = {}
    for stage in manifest["stages"]:
        place = out / FOLDER / name(stage["plan"])
        if not cloud.is_file(place):
            raise UserError(f"--append: {place} is missing, which says what the corpus has; copy the corpus again")
        sources = sources_of(stage["settings"])
        for piece in plans.of_json(json.loads(place.read_bytes())).ranges():
            file = found.setdefault(_key(piece, sources), Known(_version(piece), set()))
            file.codes.add(_codes(sources[piece.source]))
    return found


def _key(piece: Range, sources: Sequence[Source]) -> tuple:
    """A file, however its path is written, and how it is read."""
    source = sources[piece.source]
    options = source.options
    if hasattr(options, "code_field"):
        options = dataclasses.replace(options, code_field=None)  # says nothing of the text
    return _place(piece, source), source.kind, options, source.language


def _place(piece: Range, source: Source) -> str:
    local = source.kind != "tfds" and not cloud.is_remote(piece.path)
    return os.path.realpath(piece.path) if local else piece.path


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


def come_since(units: list[tuple[Range, ...]], sources: Sequence[Source], before: dict[tuple, Known]) -> int:
    """How many files the corpus does not have."""
    return len({piece.path for unit in units for piece in unit if _key(piece, sources) not in before})


def _codes(source: Source) -> str:
    """How a source's documents are given their control codes, as options."""
    if field := getattr(source.options, "code_field", None):
        return f"--code-field {field}"
    return " ".join(f"--code {code}" for code in source.codes) or "no --code"


def _version(piece: Range) -> tuple[str, ...]:
    return piece.version, *([piece.other.version] if piece.other else [])


def new(
    units: list[tuple[Range, ...]], sources: Sequence[Source], before: dict[tuple, Known], problems: Problems
) -> list[tuple[Range, ...]]:
    """What the corpus does not have yet; the rest is counted. UserError for a file that has changed since then, or is
    to have other control codes."""
    kept, seen = [], set()
    for unit in units:
        fresh = []
        for piece in unit:
            file, codes = before.get(_key(piece, sources)), _codes(sources[piece.source])
            if file is None:
                fresh.append(piece)
            elif file.version != _version(piece):
                raise UserError(
                    f"--append: {printable(piece.path)} has changed since its text was added, which would be stored "
                    "twice; name files that are new"
                )
            elif codes not in file.codes:
                raise UserError(
                    f"--append: {printable(piece.path)} is in already, with {' and '.join(sorted(file.codes))} and not "
                    f"with {codes}; leave it out, or give the same"
                )
            else:
                seen.add(piece.path)
        kept += [tuple(fresh)] if fresh else []
    for path in sorted(seen):
        problems.note(KNOWN, path)
    return kept
