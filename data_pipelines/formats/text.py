"""`text:` files of plain text; a document is a file, or a block between blank lines."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from data_pipelines.document import Document, plain
from data_pipelines.formats import cutting, files
from data_pipelines.formats import source as sizes
from data_pipelines.formats.cutting import decode, documents, pieces, readable
from data_pipelines.formats.listing import Found, is_compressed
from data_pipelines.formats.problems import REPLACED, SKIPPED
from data_pipelines.formats.source import Decoding, Format, Range, Source

# Suffixes of a folder's files, which may be compressed too. '.tokens' and '.raw' are WikiText's.
SUFFIXES = ("", ".txt", ".text", ".md", ".rst", ".tokens", ".raw")


@dataclass(frozen=True)
class Options(Decoding):
    """How text files are read."""

    documents: str = "file"  # what a document is: "file", or "blank-line"


def _cut(source: Source, found: Found) -> Iterable[Range]:
    if source.options.documents == "blank-line":
        return files.after_lines(lambda line: not line.strip(), source, found)
    # Only the end of a document decides whether it is skipped, so one reader must see all of it
    if source.options.undecodable == "skip":
        return [files.uncut(found)]
    return (part._replace(continues=part.start > 0) for part in files.cut_at(_to_cut, source, found))


def _to_cut(file: BinaryIO, place: int) -> None:
    """Go to a place at which `pieces` cuts, too."""
    window = min(cutting.WINDOW, sizes.SHARD)
    begin = (place - 1) // window * window
    file.seek(begin)
    data, following = file.read(window), file.read(1)
    file.seek(begin + (cutting.cut_of(data, following) if following else len(data)))


def _read(source: Source, part: Range, problems) -> Iterator[Document]:
    if source.options.documents == "file":
        yield from _streamed(source, part, problems)
        return
    for data in files.paragraphs(files.range_blocks(part)):
        if (text := readable(data, source, part.path, problems)) is not None:
            yield from documents(source, [text])


def _streamed(source: Source, part: Range, problems) -> Iterator[Document]:
    """Yield a document from the bytes of a range. A long one is read twice: the first time only to know whether all of
    it can be read and, if undecodable documents are skipped, decoded."""
    skip = source.options.undecodable == "skip"
    found = pieces(files.range_blocks(part), part.start)
    head, checked = list(itertools.islice(found, 2)), []
    if skip or is_compressed(part.path):
        checked = pieces(files.range_blocks(part), part.start) if len(head) > 1 else head
    if any(skip and decode(piece, "skip") is None for piece in checked):
        problems.note(SKIPPED, part.path)
        return
    replaced = False
    for index, piece in enumerate(itertools.chain(head, found)):
        text = decode(piece, "skip")
        replaced |= text is None
        yield plain(decode(piece, "replace") if text is None else text, index > 0 or part.continues)
    if replaced:
        problems.note(REPLACED, part.path)


FORMAT = Format(Options, files.of_files(_cut, SUFFIXES), _read)
