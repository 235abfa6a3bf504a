"""Read bytes of files, plain or compressed, local or in a store: blocks of bounded size, lines and records."""

import bz2
import errno
import functools
import gzip
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import BinaryIO, TypeVar

import pyarrow
import zstandard

from data_pipelines.cloud import filesystem, is_remote, patiently
from data_pipelines.errors import UserError
from data_pipelines.formats.listing import Found, find, is_compressed
from data_pipelines.formats.problems import printable
from data_pipelines.formats.source import Range, Source

BLOCK = 1 << 20  # bytes read at a time
ASKED_AT_ONCE = 16  # files of a store to look at together
LOOK = 1 << 16  # bytes per request when only the end of a line is wanted
LARGEST_RECORD = 256 << 20  # bytes; a record must fit in memory as a whole
LONGEST_WINDOW = 1 << 31  # bytes that a .zst file may look back: the most that `zstd --long` allows
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)  # raised by decompressors
Item = TypeVar("Item")
ARROW_DAMAGE = (*DAMAGE, ValueError, pyarrow.ArrowException)


class Unreadable(Exception):
    """A file ended early or is corrupt. Data that was yielded before is sound."""


class Watched:
    """An open file that remembers an error of reading, which tells it from damage in the data.   block_size: bytes that
    a store is asked for beyond what is read; None: a size that suits reading the whole file."""

    def __init__(self, path: str, block_size: int | None = None):
        self.path, self.closed = path, False
        self.error: Exception | None = None
        self.remote = is_remote(path)
        caching = {"block_size": block_size, "cache_type": "readahead"} if block_size else {}
        remotely = lambda path, mode: filesystem(path).open(path, mode, **caching)
        opened = remotely if self.remote else open
        self.file = self._try(lambda: opened(path, "rb"))

    def read(self, size: int = -1) -> bytes:
        return self._try(lambda: self.file.read(size))

    def readline(self, size: int) -> bytes:
        """Return the rest of a line, at most `size` bytes; from a store, which cannot read lines, perhaps fewer."""
        if not self.remote:
            return self._try(lambda: self.file.readline(size))
        place = self.tell()
        data = self.read(min(size, LOOK))
        end = data.find(b"\n") + 1
        if 0 < end < len(data):
            self.seek(place + end)
        return data[:end] if end else data

    def seek(self, place: int, whence: int = 0) -> int:
        return self._try(lambda: self.file.seek(place, whence))

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        self.closed = True
        self.file.close()

    def _try(self, do: Callable):
        try:
            return patiently(do, told=lambda error: None) if self.remote else do()
        except (UserError, OSError) as error:
            self.error = error
            raise
        except Exception as error:  # a store's package may raise anything
            self.error = OSError(errno.EIO, f"{type(error).__name__}: {error}", self.path)
            raise self.error from error


@contextmanager
def reading(
    path: str, damage: tuple[type[Exception], ...] = DAMAGE, block_size: int | None = None
) -> Iterator[Watched]:
    """Open a file. Damage in it raises Unreadable; OSError if it cannot be read now."""
    file = Watched(path, block_size)
    try:
        yield file
    except damage as error:
        if file.error is not None:
            raise file.error from None
        raise Unreadable(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    finally:
        file.close()


def blocks(path: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield bytes [start, end) of a plain file, or all of a compressed file's content. Raises Unreadable."""
    suffix = path[path.rfind(".") :].lower()
    with reading(path, block_size=None if end is None else BLOCK) as file:  # read little beyond a range
        if suffix == ".zst":
            yield from _zstandard_blocks(file)
        elif is_compressed(path):
            with OPENERS[suffix](file) as content:
                while block := content.read1(BLOCK):  # read() would drop the data before an error
                    yield block
        else:
            file.seek(start)
            left = end - start if end is not None else None
            while block := file.read(BLOCK if left is None else min(BLOCK, left)):
                left = None if left is None else left - len(block)
                yield block


def range_blocks(part: Range) -> Iterator[bytes]:
    """Yield the bytes of a range of a file."""
    return blocks(part.path, part.start, part.end)


def _zstandard_blocks(file: Watched) -> Iterator[bytes]:
    # zstandard's stream_reader takes a truncated file for a complete one; an object per frame knows its end.
    decompressor = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW)
    frame, rest = None, b""
    while rest or (rest := file.read(BLOCK >> 7)):  # little, since repetitive data grows much
        frame = frame or decompressor.decompressobj()
        block, rest = frame.decompress(rest), b""
        if frame.eof:
            frame, rest = None, frame.unused_data
        for at in range(0, len(block), BLOCK):
            yield block[at : at + BLOCK]
    if frame is not None:
        raise EOFError("the file ends inside a zstandard frame")


class Record:
    """Collects bytes, at most LARGEST_RECORD."""

    def __init__(self, between: bytes = b""):
        self.between, self.held, self.size = between, bytearray(), 0

    def add(self, data: bytes | None) -> None:
        """Add data; None is data that was already too long."""
        between = self.between if self.size else b""
        self.size += LARGEST_RECORD + 1 if data is None else len(data) + len(self.between)
        if self.size > LARGEST_RECORD:
            self.held.clear()
        else:
            self.held += between
            self.held += data

    def take(self) -> bytes | None:
        """Return all data, None if it was too long, and start anew."""
        held, size = self.held, self.size
        self.held, self.size = bytearray(), 0
        return bytes(held) if size <= LARGEST_RECORD else None


def lines(source: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yield lines without their newline; None for a line longer than LARGEST_RECORD."""
    record = Record()
    for block in source:
        first, *others = block.split(b"\n")
        record.add(first)
        if others:
            yield record.take()
            yield from others[:-1]
            record.add(others[-1])
    if record.size:
        yield record.take()


def paragraphs(source: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yield runs of lines between blank lines; None for a run longer than LARGEST_RECORD."""
    record = Record(b"\n")
    for line in lines(source):
        if line is None or line.strip():
            record.add(line)
        elif record.size:
            yield record.take()
    if record.size:
        yield record.take()


def each(items: Iterable[Item], cut: Callable[[Source, Item], Iterable[Range]], source: Source) -> Iterator[Range]:
    """Yield the ranges into which each item, a file or what names it, is cut, in order. Several items are cut at a time
    if the source is in a store, whose answers are slow."""
    look = lambda item: list(cut(source, item))
    with ThreadPoolExecutor(ASKED_AT_ONCE) if is_remote(source.location) else nullcontext() as pool:
        yield from itertools.chain.from_iterable(pool.map(look, items) if pool else map(look, items))


def of_files(cut: Callable[[Source, Found], Iterable[Range]], suffixes: Sequence[str]) -> Callable:
    """Return the `ranges` of a format whose files have these suffixes (see `find`) and are cut one by one."""
    return lambda source, problems, exclude: each(find(source, problems, exclude, suffixes), cut, source)


def uncut(found: Found) -> Range:
    return Range(0, found.path, 0, None, found.text_size, False, found.version)


def cut_at(border: Callable[[BinaryIO, int], None], source: Source, found: Found) -> Iterator[Range]:
    """Yield a file, a long plain one in ranges of about a shard. border: moves a file from a byte to a document."""
    start, whole = 0, uncut(found)
    if is_compressed(found.path) or (found.size or 0) <= source.shard:
        yield whole
        return
    with reading(found.path, block_size=LOOK) as file:
        while start < found.size:
            end = found.size
            if start + source.shard < found.size:
                border(file, start + source.shard)
                end = min(file.tell(), found.size)
            yield whole._replace(start=start, end=end, size=end - start)
            start = end


def to_line(file: BinaryIO, place: int) -> None:
    """Go to the first line that begins after a place."""
    file.seek(place)
    skip_line(file)


at_lines = functools.partial(cut_at, to_line)


def after_lines(ends: Callable[[bytes], bool], source: Source, found: Found) -> Iterator[Range]:
    """Like `cut_at`; a document begins after a line for which `ends` is true."""

    def border(file: BinaryIO, place: int) -> None:
        to_line(file, place)
        while (line := skip_line(file)) and not ends(line):
            pass

    return cut_at(border, source, found)


def skip_line(file: BinaryIO) -> bytes:
    """Go to the next line. Returns the last read, at most a MiB, of the line that was passed."""
    line = chunk = file.readline(1 << 20)
    while chunk and not chunk.endswith(b"\n"):
        chunk = file.readline(1 << 20)
    return line


def check_fields(source: Source, where: str, what: str, there: Sequence[str]) -> None:
    """Raise UserError if a field that the source names is missing."""
    named = [("--field", field) for field in source.options.fields]
    named += [(value.option, value.field) for value in source.values if value.field]
    for option, field in named:
        if field not in there:
            raise UserError(f"{option} {field}: {printable(where)} has no such {what}; it has {', '.join(there)}")
