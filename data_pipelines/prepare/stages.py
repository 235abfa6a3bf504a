"""The times that text was added to a corpus. Their plans stay beside it, so that no file is added a second time.

OUT/plans/HASH.json
"""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.formats.source import Range, Source
from data_pipelines.formats.values import CODE
from data_pipelines.prepare import plan as plans
from data_pipelines.prepare.options import sources_of

FOLDER = "plans"
KNOWN = "files left out that the corpus has already"


def name(plan_hash: str) -> str:
    return f"{plan_hash[:16]}.json"


def known(out: Path, manifest: dict) -> dict[tuple, dict[str, tuple]]:
    """(path, how it was read) of files whose text a corpus has -> {how its documents were given codes: version}."""
    found = {}
    for stage in manifest["stages"]:
        place = out / FOLDER / name(stage["plan"])
        if not cloud.is_file(place):
            raise UserError(f"--append: {place} is missing, which says what the corpus has; copy the corpus again")
        sources = sources_of(stage["settings"])
        for piece in plans.of_json(json.loads(place.read_bytes())).ranges():
            found.setdefault(_key(piece, sources), {})[_codes(sources[piece.source])] = _version(piece)
    return found


def _key(piece: Range, sources: Sequence[Source]) -> tuple:
    """A file, however its path is written, and how it is read."""
    source = sources[piece.source]
    return _place(piece, source), source.kind, source.options, source.language


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


def _codes(source: Source) -> str:
    """How a source's documents are given their control codes, as options."""
    code = next((value for value in source.values if value.name == CODE), None)
    if code is None:
        return "no --code"
    return f"--code-field {code.field}" if code.field else f"--code {code.known[0]}"


def _version(piece: Range) -> tuple[str, ...]:
    return piece.version, *([piece.other.version] if piece.other else [])


def new(
    units: list[tuple[Range, ...]], sources: Sequence[Source], before: dict[tuple, dict], problems: Problems
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
