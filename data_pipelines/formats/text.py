"""`text:` files of plain text, each a document, or what blank lines separate in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from data_pipelines.document import Document
from data_pipelines.formats import cutting, files
from data_pipelines.formats import source as sizes
from data_pipelines.formats.cutting import decoded, streamed, whole
from data_pipelines.formats.listing import is_compressed
from data_pipelines.formats.source import Decoding, Format, Range, Source

# Of a folder's files; also compressed. '.tokens' and '.raw' are those of WikiText.
SUFFIXES = ("", ".txt", ".text", ".md", ".rst", ".tokens", ".raw")


@dataclass(frozen=True)
class Options(Decoding):
    """How text files are read."""

    documents: str = "file"  # or "blank-line": what separates documents


def _ranges(index: int, source: Source, problems, exclude: Sequence[str]) -> Iterator[Range]:
    options = source.options
    if options.documents == "blank-line":
        yield from files.files_of(index, source, problems, exclude, _to_blank_line, SUFFIXES)
    elif options.undecodable == "skip":
        # Whether a long document is to be skipped is known at its end only, so one reader must see all of it.
        yield from files.files_of(index, source, problems, exclude, None, SUFFIXES)
    else:
        for part in files.files_of(index, source, problems, exclude, _to_cut, SUFFIXES):
            yield part._replace(continues=part.start > 0)


def _to_blank_line(file: BinaryIO, place: int) -> None:
    files.to_line(file, place)
    while (line := files.skip_line(file)) and line.strip():
        pass


def _to_cut(file: BinaryIO, place: int) -> None:
    """Go to where `pieces` cuts, too."""
    window = min(cutting.WINDOW, sizes.SHARD)
    begin = (place - 1) // window * window
    file.seek(begin)
    data, following = file.read(window), file.read(1)
    file.seek(begin + (cutting.cut_of(data, following) if following else len(data)))


def _read(source: Source, part: Range, problems) -> Iterator[Document]:
    if source.options.documents == "file":
        check_whole = source.options.undecodable == "skip" or is_compressed(part.path)
        yield from streamed(lambda: files.range_blocks(part), source, part, problems, check_whole)
        return
    for text in decoded(files.paragraphs(files.range_blocks(part)), source, part, problems):
        yield from whole(text)


FORMAT = Format(Options, _ranges, _read, location="DIR_OR_PATTERN")
