"""`dialogue:` files with a turn a line and a blank line after each dialogue. A dialogue is a document, whose segments
are the turns; their names alternate."""

import itertools
from collections.abc import Iterable, Iterator

from data_pipelines.document import Document
from data_pipelines.formats import files
from data_pipelines.formats.cutting import documents, readable
from data_pipelines.formats.listing import Found
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import Decoding, Format, Range, Source

NAMES = ("query", "response")
SUFFIXES = ("", ".txt")


def _cut(source: Source, found: Found) -> Iterable[Range]:
    return files.after_lines(lambda line: not line.strip(), source, found)


def _read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    for data in files.paragraphs(files.range_blocks(part)):
        if (text := readable(data, source, part.path, problems)) is not None:
            turns = [line for line in text.split("\n") if line.strip()]
            yield from documents(source, turns or [""], [*itertools.islice(itertools.cycle(NAMES), len(turns) or 1)])


FORMAT = Format(Decoding, files.of_files(_cut, SUFFIXES), _read, segments=lambda options: NAMES)
