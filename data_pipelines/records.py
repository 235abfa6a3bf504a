"""Ranges of a source to documents, in bounded memory. What cannot be read is counted, never fatal."""

import functools
import html
import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

from data_pipelines import builtin, files
from data_pipelines.errors import UserError

# The problems that may be counted, as the manifest and the screen call them
REPLACED = "documents with undecodable bytes replaced"
SKIPPED = "documents with undecodable bytes skipped"
UNREADABLE = "files unreadable or cut short"
MALFORMED = "malformed records"
NO_FIELD = "records without the field"
NOT_TEXT = "records whose field is not text"
EMPTY = "empty documents"
TOO_LONG = "records longer than 256 MiB"


class Piece(NamedTuple):
    """A document, or one of the pieces of a long one."""

    text: str
    first: bool = True  # a document begins here


class Problems(dict):
    """problem -> {'count': n, 'first': where it was first met}."""

    def note(self, problem: str, where: str, count: int = 1) -> None:
        self.setdefault(problem, {"count": 0, "first": where})["count"] += count

    def merge(self, other: dict) -> None:
        for problem, seen in other.items():
            self.note(problem, seen["first"], seen["count"])


def read(source, part, problems: Problems) -> Iterator[Piece]:
    """The documents of one range of a source; an empty one is counted by whoever finds that it has no tokens."""
    try:
        yield from READERS[source.kind](source, part, problems)
    except files.Unreadable as error:
        problems.note(UNREADABLE, f"{part.path}: {error}")


def _text(source, part, problems):
    if source.documents == "blank-line":
        yield from _decoded(files.paragraphs(_blocks(part)), source, part, problems)
        return
    pieces = files.pieces(_blocks(part))
    head = [piece for _, piece in zip(range(2), pieces, strict=False)]
    if len(head) > 1 and (source.undecodable == "skip" or files.is_compressed(part.path)):
        # A long document is read twice: the first time only to know whether all of it can be.
        for piece in files.pieces(_blocks(part)):
            if _decode(piece, "skip") is None and source.undecodable == "skip":
                problems.note(SKIPPED, part.path)
                return
    replaced = False
    for index, piece in enumerate(_chain(head, pieces)):
        text = _decode(piece, "skip")
        if text is None and source.undecodable == "skip":
            problems.note(SKIPPED, part.path)
            return
        replaced |= text is None
        yield Piece(_decode(piece, "replace") if text is None else text, index == 0 and not part.continues)
    if replaced:
        problems.note(REPLACED, part.path)


def _chain(head: list[bytes], rest: Iterable[bytes]) -> Iterator[bytes]:
    yield from head
    yield from rest


def _blocks(part) -> Iterator[bytes]:
    return files.blocks(part.path, part.start, part.end)


def _decode(data: bytes, undecodable: str) -> str | None:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace") if undecodable == "replace" else None


def _decoded(raw: Iterable[bytes | None], source, part, problems) -> Iterator[Piece]:
    for data in raw:
        if data is None:
            problems.note(TOO_LONG, part.path)
        elif (text := _readable(data, source, part.path, problems)) is not None:
            yield Piece(text)


def _readable(data: bytes | str, source, where: str, problems) -> str | None:
    """Text that can be encoded as UTF-8. A str may hold lone surrogates, which JSON can escape: as undecodable."""
    if isinstance(data, str):
        if data.isascii():
            return data
        data = data.encode("utf-8", "surrogatepass")
    text = _decode(data, "skip")
    if text is not None:
        return text
    problems.note(SKIPPED if source.undecodable == "skip" else REPLACED, where)
    return _decode(data, source.undecodable)


def _jsonl(source, part, problems):
    for number, line in enumerate(files.lines(_blocks(part)), 1):
        where = f"{part.path}, line {number}" + (f" after byte {part.start}" if part.start else "")
        if line is None:
            problems.note(TOO_LONG, where)
            continue
        line = _readable(line.strip(), source, where, problems)
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.note(MALFORMED, f"{where}: {error}")
            continue
        if not isinstance(record, dict):
            problems.note(MALFORMED, f"{where}: not an object")
        elif source.field not in record:
            problems.note(NO_FIELD, where)
        else:
            yield from _value(record[source.field], source, where, problems)


def _value(value, source, where, problems) -> Iterator[Piece]:
    if value is None:
        problems.note(EMPTY, where)
    elif not isinstance(value, str | bytes):
        problems.note(NOT_TEXT, where)
    elif (text := _readable(value, source, where, problems)) is not None:
        yield Piece(text)


def _parquet(source, part, problems):
    try:
        file = pyarrow.parquet.ParquetFile(part.path)
        if source.field not in file.schema_arrow.names:
            problems.note(NO_FIELD, part.path, file.metadata.num_rows)
            return
        groups = range(part.start, file.num_row_groups if part.end is None else part.end)
        for batch in file.iter_batches(batch_size=1024, row_groups=list(groups), columns=[source.field]):
            for value in batch.column(0).to_pylist():
                yield from _value(value, source, part.path, problems)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise files.Unreadable(str(error).splitlines()[0]) from error


def _wikiextractor(source, part, problems):
    """<doc ...> on a line, the title, the text, </doc> on a line. A block without its end is malformed."""

    def articles():
        held, size = None, 0
        for line in files.lines(_blocks(part)):
            if line is not None and line.startswith((b"<doc ", b"<doc>")):
                if held is not None:
                    problems.note(MALFORMED, f"{part.path}: <doc> inside <doc>")
                held, size = [], 0
            elif line is not None and line.startswith(b"</doc>"):
                if held is None:
                    problems.note(MALFORMED, f"{part.path}: </doc> without <doc>")
                else:
                    yield b"\n".join(held) if size <= files.LARGEST_RECORD else None
                held = None
            elif held is not None:
                size += files.LARGEST_RECORD + 1 if line is None else len(line) + 1
                if size <= files.LARGEST_RECORD:
                    held.append(line)
                else:
                    held.clear()
            elif line is None or line.strip():
                problems.note(MALFORMED, f"{part.path}: text outside <doc>")
        if held is not None:
            problems.note(MALFORMED, f"{part.path}: <doc> without </doc>")

    for piece in _decoded(articles(), source, part, problems):
        yield Piece(html.unescape(piece.text))


def _tfds(source, part, problems):
    examples = tfds_examples(source)
    for index in range(part.start, part.end):
        try:
            record = examples[index]
        except Exception as error:  # a damaged file raises whatever its reader does
            raise files.Unreadable(str(error).splitlines()[0]) from error
        where = f"{part.path}, example {index}"
        if source.field not in record:
            features = ", ".join(record)
            raise UserError(f"--field {source.field}: {part.path} has no such feature; it has {features}")
        yield from _value(record[source.field], source, where, problems)


@functools.cache
def tfds_examples(source):
    """The random-access examples of 'NAME:SPLIT', downloaded and built as array_record if need be."""
    import tensorflow_datasets  # slow to import, and needed by this kind alone

    name, _, split = source.location.rpartition(":")
    try:
        return tensorflow_datasets.data_source(
            name, split=split, data_dir=source.tfds_dir, builder_kwargs={"file_format": "array_record"}
        )
    except Exception as error:  # anything from a wrong name to a missing dependency of one data set
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"--source tfds:{source.location} cannot be opened: {reason}; see --tfds-dir") from error


def _builtin(source, part, problems):
    for text in builtin.documents(part.path):
        if text:  # a module without docstrings is no document
            yield Piece(text)


READERS = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "wikiextractor": _wikiextractor,
    "tfds": _tfds,
    "builtin": _builtin,
}
