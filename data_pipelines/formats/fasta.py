"""`fasta:` files of sequences. A line that begins with '>' is a header; the lines after it, without white space and in
capitals, are a document (small letters mark repeats in the same alphabet). Lines that begin with ';' are comments.

In nucleotides a run of GAP or more Ns, which stand for unread letters, ends a document, and another one begins after
it; fewer Ns are unknown letters of the sequence. In proteins, N is an amino acid.
"""

import contextlib
import itertools
import re
import string
from collections.abc import Iterator
from typing import BinaryIO

from data_pipelines.document import Document, plain
from data_pipelines.errors import UserError
from data_pipelines.formats import files
from data_pipelines.formats.cutting import decode, pieces
from data_pipelines.formats.listing import Found
from data_pipelines.formats.problems import EMPTY, REPLACED, Problems, printable
from data_pipelines.formats.source import Format, NoOptions, Range, Source

SUFFIXES = (".fasta", ".fa", ".fna", ".ffn", ".faa", ".frn", ".fas")
WHITE = string.whitespace.encode()
GAP = 10  # the fewest Ns that NCBI's assemblies count as a gap
GAPS = re.compile(rb"N{%d,}" % GAP)
PROTEIN = re.compile(rb"[EFILPQ]")  # letters of amino acids that no nucleotide has
TOLD = 1000  # letters that decide which of the two a sequence is


def _cut(source: Source, found: Found) -> Iterator[Range]:
    """Cut a file into ranges. Raises UserError if there is text before its first header."""
    begin = b""
    with contextlib.suppress(files.Unreadable):  # the reader counts it
        begin = next(files.blocks(found.path), b"").lstrip()[:1]
    if begin not in (b">", b";", b""):
        raise UserError(
            f"--source {source}: {printable(found.path)} does not begin with '>', so it is not FASTA; "
            "name the FASTA files with a pattern such as 'DIR/*.fa'"
        )
    return files.cut_at(_to_header, source, found)


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
    replaced, headers = False, [b""]
    sequences = _sequences(files.range_blocks(part), headers)
    for number, group in itertools.groupby(sequences, lambda found: found[0]):
        empty = True
        for _, stretch in itertools.groupby(_stretches(data for _, data in group), lambda found: found[0]):
            for index, piece in enumerate(pieces(data for _, data in stretch)):
                text = decode(piece, "replace")
                replaced |= decode(piece, "skip") is None
                name, _, said = headers[number].decode("utf-8", "replace").removeprefix(">").strip().partition(" ")
                yield plain(text, index > 0)._replace(values={"id": name, "description": said})
                empty = False
        if empty and number:  # number 0 has no header
            problems.note(EMPTY, part.path)
    if replaced:
        problems.note(REPLACED, part.path)


def _sequences(blocks: Iterator[bytes], headers: list[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the header before, letters): some for each block, none for each header; fill `headers`."""
    number, in_header, begins, kept = 0, False, True, False
    for block in blocks:
        letters = []
        for index, line in enumerate(block.replace(b"\r", b"\n").split(b"\n")):
            if index:
                in_header, begins = False, True
            if begins and line:
                in_header, begins, kept = line[:1] in (b">", b";"), False, line[:1] == b">"
                if kept:
                    yield number, _joined(letters)
                    letters, number = [], number + 1
                    headers.append(b"")
            if not in_header:
                letters.append(line)
            elif kept:
                headers[number] += line
        yield number, _joined(letters)


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(lines).translate(None, WHITE).upper()


def _stretches(blocks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the stretch, letters); a gap ends a stretch of the sequence."""
    told = b""
    for block in blocks:
        told += block
        if len(told) >= TOLD:
            break
    if PROTEIN.search(told[:TOLD]):
        yield from ((0, block) for block in (told, *blocks))
        return
    number, held = 0, b""  # Ns at the end of a block may continue in the next
    for block in itertools.chain([told], blocks):
        read = held + block
        letters = read.rstrip(b"N")
        held = read[len(letters) :][:GAP]
        for index, stretch in enumerate(GAPS.split(letters)):
            number += index > 0
            yield number, stretch
    if len(held) < GAP:
        yield number, held


FORMAT = Format(NoOptions, files.of_files(_cut, SUFFIXES), _read, values=("id", "description"))
