"""`jsonl:` files of which each line is a JSON object with the text in a field."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_pipelines.document import Document
from data_pipelines.formats import files
from data_pipelines.formats.problems import MALFORMED, TOO_LONG
from data_pipelines.formats.source import Format, Range, Source
from data_pipelines.formats.texts import document_of, readable, segments_of


@dataclass(frozen=True)
class Options:
    """Which fields hold the text."""

    fields: tuple[str, ...] = ("text",)  # one: the text; several: the segments
    undecodable: str = "replace"  # or "skip": what to do with a document that is not UTF-8


def _ranges(index: int, source: Source, problems, exclude: Sequence[str]) -> Iterator[Range]:
    return files.ranges(index, source, problems, exclude, lambda file: None)


def _read(source: Source, part: Range, problems) -> Iterator[Document]:
    for number, line in enumerate(files.lines(files.range_blocks(part)), 1):
        where = f"{part.path}, line {number}" + (f" after byte {part.start}" if part.start else "")
        if line is None:
            problems.note(TOO_LONG, where)
            continue
        line = readable(line.strip(), source, where, problems)
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.note(MALFORMED, f"{where}: {error}")
            continue
        if not isinstance(record, dict):
            problems.note(MALFORMED, f"{where}: not an object")
        else:
            yield from document_of(record, source, where, problems)


FORMAT = Format(Options, _ranges, _read, location="PATTERN", segments=segments_of)
