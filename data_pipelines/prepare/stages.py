"""The times that text was added to a corpus. Their plans stay beside it, so that no file is added a second time.

    OUT/plans/HASH.json
"""

from collections.abc import Sequence
from pathlib import Path

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.formats.source import Range, Source
from data_pipelines.prepare import plan as plans
from data_pipelines.prepare.options import sources_of

FOLDER = "plans"
KNOWN = "files left out that the corpus has already"


def name(plan_hash: str) -> str:
    return f"{plan_hash[:16]}.json"


def known(out: Path, manifest: dict) -> dict[tuple, str]:
    """(path, how it was read) -> version of the files whose text a corpus has."""
    found = {}
    for stage in manifest["stages"]:
        place = out / FOLDER / name(stage["plan"])
        if not cloud.is_file(place):
            raise UserError(f"--append: {place} is missing, which says what the corpus has; copy the corpus again")
        sources = sources_of(stage["settings"])
        for piece in plans.of_json(place.read_bytes()).ranges():
            found[piece.path, *_reading(sources[piece.source])] = piece.version
    return found


def _reading(source: Source) -> tuple:
    return source.kind, source.options, source.language


def new(
    units: list[tuple[Range, ...]], sources: Sequence[Source], before: dict[tuple, str], problems: Problems
) -> list[tuple[Range, ...]]:
    """What the corpus does not have yet; the rest is counted. UserError for a file that has changed since then."""
    kept, seen = [], set()
    for unit in units:
        fresh = []
        for piece in unit:
            version = before.get((piece.path, *_reading(sources[piece.source])))
            if version is None:
                fresh.append(piece)
            elif version != piece.version:
                raise UserError(
                    f"--append: {printable(piece.path)} has changed since its text was added, which would be stored "
                    "twice; name files that are new"
                )
            else:
                seen.add(piece.path)
        kept += [tuple(fresh)] if fresh else []
    for path in sorted(seen):
        problems.note(KNOWN, path)
    return kept
