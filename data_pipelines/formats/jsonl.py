"""`jsonl:` files with one JSON object per line, whose text is in a field."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_pipelines.document import Document
from data_pipelines.formats import files
from data_pipelines.formats.cutting import document_of, readable, segments_of
from data_pipelines.formats.listing import find
from data_pipelines.formats.problems import MALFORMED, NO_FIELD, Problems
from data_pipelines.formats.source import Decoding, Format, Range, Source

SUFFIXES = ("", ".jsonl", ".ndjson", ".json")
LOOKED_AT = 4 << 20  # leading bytes of a source in which some record must have the fields


@dataclass(frozen=True)
class Options(Decoding):
    """Which fields hold the text."""

    fields: tuple[str, ...] = ("text",)  # a single one: the text; several: the segments


def _ranges(source: Source, problems: Problems, exclude: Sequence[str]) -> Iterator[Range]:
    found = find(source, problems, exclude, SUFFIXES)
    _check_fields(source, next(file.path for file in found if file.size != 0))
    return files.each(found, files.at_lines, source)


def _check_fields(source: Source, path: str) -> None:
    """Raise UserError if no record at the beginning of the first file has a field."""
    there = {}
    with contextlib.suppress(files.Unreadable):  # the reader counts it
        for line in files.lines(itertools.islice(files.blocks(path), LOOKED_AT // files.BLOCK)):
            record = _parse(line.decode("utf-8", "replace").strip()) if line else None
            if isinstance(record, dict):
                there |= dict.fromkeys(record)
                if there.keys() >= {*source.columns}:
                    return
        if there:
            files.check_fields(source, path, "field", list(there))


def _parse(line: str):
    """Return the object in a line, or a str that says what is wrong with the line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return str(error)
    return record if isinstance(record, dict) else "not an object"


def _read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    number = 0
    for line in files.lines(files.range_blocks(part)):
        number += 1  # enumerate() would keep the line in memory after it is parsed
        where = f"{part.path}, line {number}" + (f" after byte {part.start}" if part.start else "")
        line = readable(line and line.strip(), source, where, problems)
        if not line:
            continue
        record = line = _parse(line)
        if isinstance(record, str):
            problems.note(MALFORMED, f"{where}: {record}")
        elif missing := [field for field in source.options.fields if field not in record]:
            problems.note(NO_FIELD, f"{where}: it has no {missing[0]} but {', '.join(record)[:200]}")
        else:
            yield from document_of(record, source, where, problems)


FORMAT = Format(Options, _ranges, _read, segments=segments_of, values=None)
