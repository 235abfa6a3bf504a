"""Bytes of plain and compressed files, in blocks of bounded size, cut into lines and records."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

BLOCK = 1 << 20  # bytes read at a time, and the largest piece of a streamed document
LARGEST_RECORD = 256 << 20  # bytes; a line or document that must be whole in memory may not be longer
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": None}


class Unreadable(Exception):
    """A file ended early, is corrupt, or may not be read; what was yielded before is sound."""


class TooLong(Exception):
    """A record was longer than LARGEST_RECORD and was passed over."""


def is_compressed(path: str) -> bool:
    return Path(path).suffix.lower() in COMPRESSED


def blocks(path: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Bytes [start, end) of a plain file, or all of a compressed file's content. Raises Unreadable."""
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".zst":
            yield from _zstandard_blocks(path)
        elif suffix in COMPRESSED:
            with COMPRESSED[suffix](path) as file:
                while block := file.read1(BLOCK):  # read() would drop what came before an error
                    yield block
        else:
            with open(path, "rb") as file:
                file.seek(start)
                while block := file.read(BLOCK if end is None else min(BLOCK, end - file.tell())):
                    yield block
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise Unreadable(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _zstandard_blocks(path: str) -> Iterator[bytes]:
    # zstandard's stream_reader takes a truncated file for a complete one; an object per frame knows its end.
    with open(path, "rb") as file:
        frame, rest = None, b""
        while rest or (rest := file.read(BLOCK >> 4)):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            block, rest = frame.decompress(rest), b""
            if frame.eof:
                frame, rest = None, frame.unused_data
            if block:
                yield block
        if frame is not None:
            raise EOFError("the file ends inside a zstandard frame")


def lines(source: Iterable[bytes]) -> Iterator[bytes | None]:
    """Lines without their newline; None in place of a line longer than LARGEST_RECORD."""
    held: list[bytes] = []
    size = 0
    for block in source:
        first, *others = block.split(b"\n")
        size += len(first)
        if size <= LARGEST_RECORD:
            held.append(first)
        else:
            held.clear()
        if not others:
            continue
        yield b"".join(held) if size <= LARGEST_RECORD else None
        yield from others[:-1]
        held, size = [others[-1]], len(others[-1])
    if size:
        yield b"".join(held) if size <= LARGEST_RECORD else None


def paragraphs(source: Iterable[bytes]) -> Iterator[bytes | None]:
    """Runs of lines between blank lines; None in place of one longer than LARGEST_RECORD."""
    held: list[bytes] = []
    size = 0
    for line in lines(source):
        if line is not None and not line.strip():
            if size:
                yield b"\n".join(held) if size <= LARGEST_RECORD else None
            held, size = [], 0
            continue
        size += LARGEST_RECORD + 1 if line is None else len(line) + 1
        if size <= LARGEST_RECORD:
            held.append(line)
        else:
            held.clear()
    if size:
        yield b"\n".join(held) if size <= LARGEST_RECORD else None


def pieces(source: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of at most BLOCK, cut after a newline, else after a space, else between characters."""
    held = b""
    for block in source:
        held += block
        while len(held) > BLOCK:
            cut = held.rfind(b"\n", 0, BLOCK) + 1 or held.rfind(b" ", 0, BLOCK) + 1 or _character_start(held, BLOCK)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _character_start(data: bytes, at: int) -> int:
    """The last position <= at, at most three bytes back, that does not split a UTF-8 character."""
    return next((at - back for back in range(4) if data[at - back] & 0xC0 != 0x80), at)
