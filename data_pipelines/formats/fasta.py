"""`fasta:` files of sequences: a line that begins with '>' is a header, and what follows it, without its line ends and
other white space, is a document. Lines that begin with ';' are comments."""

import itertools
import string
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from data_pipelines.document import Document, plain
from data_pipelines.errors import UserError
from data_pipelines.formats import files
from data_pipelines.formats.cutting import decode, pieces
from data_pipelines.formats.listing import Found, find
from data_pipelines.formats.problems import EMPTY, REPLACED, Problems, printable
from data_pipelines.formats.source import Format, NoOptions, Range, Source

SUFFIXES = (".fasta", ".fa", ".fna", ".ffn", ".faa", ".frn", ".fas")
WHITE = string.whitespace.encode()


def _ranges(index: int, source: Source, problems: Problems, exclude: Sequence[str]) -> Iterator[Range]:
    found = find(source, problems, exclude, SUFFIXES)
    for file in found:
        _check_header(source, file)
    return files.ranges(index, source, found, _to_header)


def _check_header(source: Source, found: Found) -> None:
    """UserError for a file with something before its first header."""
    try:
        begin = next(files.blocks(found.path), b">").lstrip()[:1]
    except files.Unreadable:
        return  # its reader counts it
    if begin not in (b">", b";", b""):
        raise UserError(
            f"--source {source}: {printable(found.path)} does not begin with '>', so it is no FASTA; "
            "name the files that are with a pattern such as 'DIR/*.fa'"
        )


def _to_header(file: BinaryIO, place: int) -> None:
    """Go to the first header after a place, or to the end."""
    file.seek(place)
    position, held = place, b""
    while block := file.read(files.BLOCK):
        held += block
        at = held.find(b"\n>")
        if at >= 0:
            file.seek(position + at + 1)
            return
        position += len(held) - 1
        held = held[-1:]


def _read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    replaced = False
    for number, group in itertools.groupby(_sequences(files.range_blocks(part)), lambda found: found[0]):
        empty = True
        for piece in pieces(data for _, data in group):
            text = decode(piece, "replace")
            replaced |= decode(piece, "skip") is None
            yield plain(text, continues=not empty)
            empty = False
        if empty and number:  # else there was nothing before the first header
            problems.note(EMPTY, part.path)
    if replaced:
        problems.note(REPLACED, part.path)


def _sequences(blocks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """(which header it follows, letters), some letters for each block, none for each header."""
    number, in_header, begins = 0, False, True
    for block in blocks:
        letters = []
        for index, line in enumerate(block.replace(b"\r", b"\n").split(b"\n")):
            if index:
                in_header, begins = False, True
            if begins and line:
                in_header, begins = line[:1] in (b">", b";"), False
                if line[:1] == b">":
                    yield number, _joined(letters)
                    letters, number = [], number + 1
            if not in_header:
                letters.append(line)
        yield number, _joined(letters)


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(lines).translate(None, WHITE)


FORMAT = Format(NoOptions, _ranges, _read, "DIR_OR_PATTERN")
