"""Files that a source names, and the bytes of plain and compressed ones: blocks of bounded size, lines and records."""

import bz2
import glob
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import zstandard

from data_pipelines.errors import UserError
from data_pipelines.formats import source as sizes
from data_pipelines.formats.source import Range, Source

BLOCK = 1 << 20  # bytes read at a time
LARGEST_RECORD = 256 << 20  # bytes; a line or document that must be whole in memory may not be longer
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": None}


class Unreadable(Exception):
    """A file ended early, is corrupt, or may not be read; what was yielded before is sound."""


def is_compressed(path: str) -> bool:
    return Path(path).suffix.lower() in COMPRESSED


def find(source: Source, problems, exclude: Sequence[str]) -> list[str]:
    """The files of a source, sorted: all below a directory, or what a glob matches; hidden files are left out."""
    location = os.path.expanduser(source.location)
    if os.path.isdir(location):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(location) for name in names]
        relative = [(path, os.path.relpath(path, location)) for path in found]
        files = [path for path, name in relative if not any(part.startswith(".") for part in Path(name).parts)]
    elif os.path.exists(location):
        files = [location]
    else:
        files = [path for path in glob.glob(location, recursive=True) if os.path.isfile(path)]
    if not files:
        exists = "has no files" if os.path.isdir(location) else "does not exist, and as a pattern matches no file"
        raise UserError(
            f"--source {source} {exists}; give a directory, a file or a quoted pattern such as 'DIR/**/*.txt'"
        )
    if not any(os.path.getsize(path) for path in files):
        raise UserError(f"--source {source}: all {len(files)} files are empty; give files with text")
    return sorted(files)


def check_fields(source: Source, where: str, what: str, there: Sequence[str]) -> None:
    """UserError where a field that the source names is not there."""
    for field in source.options.fields:
        if field not in there:
            raise UserError(f"--field {field}: {where} has no such {what}; it has {', '.join(there)}")


def ranges(
    index: int,
    source: Source,
    problems,
    exclude: Sequence[str],
    border: Callable[[BinaryIO], None] | None,
    continues: bool = False,
) -> Iterator[Range]:
    """The files of a source, long plain ones in pieces of about SHARD bytes. border: moves a file from the beginning
    of a line to where a document begins, or `continues`; None: files may not be cut."""
    for path in find(source, problems, exclude):
        size = os.path.getsize(path)
        if border is None or is_compressed(path) or size <= sizes.SHARD:
            yield Range(index, path, 0, None, size)
        else:
            cuts = _cuts(path, size, border)
            for start, end in zip(cuts, cuts[1:], strict=False):
                yield Range(index, path, start, end, end - start, continues and start > 0)


def _cuts(path: str, size: int, border: Callable[[BinaryIO], None]) -> list[int]:
    """Byte offsets from 0 to size, about SHARD apart."""
    cuts = [0]
    with open(path, "rb") as file:
        while cuts[-1] + sizes.SHARD < size:
            file.seek(cuts[-1] + sizes.SHARD)
            skip_line(file)
            border(file)
            if file.tell() >= size:
                break
            cuts.append(file.tell())
    return [*cuts, size]


def skip_line(file: BinaryIO) -> bytes:
    """Go to the next line; the last of what was passed, at most a MiB."""
    line = chunk = file.readline(1 << 20)
    while chunk and not chunk.endswith(b"\n"):
        chunk = file.readline(1 << 20)
    return line


def range_blocks(part: Range) -> Iterator[bytes]:
    """The bytes of a range of a file."""
    return blocks(part.path, part.start, part.end)


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
