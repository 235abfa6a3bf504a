"""`text:` files of plain text, each a document, or what blank lines separate in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_pipelines.document import Document
from data_pipelines.formats import files
from data_pipelines.formats.source import Format, Range, Source
from data_pipelines.formats.texts import decoded, streamed, whole


@dataclass(frozen=True)
class Options:
    """How text files are read."""

    documents: str = "file"  # or "blank-line": what separates documents
    undecodable: str = "replace"  # or "skip": what to do with a document that is not UTF-8


def _ranges(index: int, source: Source, problems, exclude: Sequence[str]) -> Iterator[Range]:
    options = source.options
    if options.documents == "blank-line":
        return files.ranges(index, source, problems, exclude, _to_blank_line)
    if options.undecodable == "skip":
        # Whether a long document is to be skipped is known at its end only, so one reader must see all of it.
        return files.ranges(index, source, problems, exclude, None)
    return files.ranges(index, source, problems, exclude, lambda file: None, continues=True)


def _to_blank_line(file) -> None:
    while (line := files.skip_line(file)) and line.strip():
        pass


def _read(source: Source, part: Range, problems) -> Iterator[Document]:
    if source.options.documents == "file":
        check_whole = source.options.undecodable == "skip" or files.is_compressed(part.path)
        yield from streamed(lambda: files.range_blocks(part), source, part, problems, check_whole)
        return
    for text in decoded(files.paragraphs(files.range_blocks(part)), source, part, problems):
        yield from whole(text)


FORMAT = Format(Options, _ranges, _read, location="DIR_OR_PATTERN")
