"""`arrow:` a data set that Hugging Face's `save_to_disk` wrote: a folder with state.json, which names files of Arrow's
IPC streams. Read with pyarrow alone."""

import itertools
import json
import os
import struct
from collections.abc import Iterator, Sequence

import pyarrow

from data_pipelines.cloud import is_remote
from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.formats import files
from data_pipelines.formats.cutting import document_of, records, segments_of
from data_pipelines.formats.jsonl import Options
from data_pipelines.formats.listing import Found, look
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.formats.source import Format, Range, Source

CONTINUATION = 0xFFFFFFFF  # before each message, then the length of its metadata; 0 ends the stream
SCHEMA, RECORDS = 1, 3  # kinds of messages


def _ranges(index: int, source: Source, problems: Problems, exclude: Sequence[str]) -> Iterator[Range]:
    of_file = lambda path: list(_batches(index, source, look(path)))
    return itertools.chain.from_iterable(files.in_order(of_file, _data_files(source), source))


def _data_files(source: Source) -> list[str]:
    folder = source.location.rstrip("/")
    folder = folder if is_remote(folder) else os.path.expanduser(folder)
    state = _json(f"{folder}/state.json")
    if state is not None:
        return [f"{folder}/{file['filename']}" for file in state["_data_files"]]
    splits = _json(f"{folder}/dataset_dict.json")
    if splits is not None:
        first = splits["splits"][0]
        said = f"holds the splits {', '.join(splits['splits'])}; name one, as in arrow:{source.location}/{first}"
    else:
        said = "has no state.json; give a folder that a data set's save_to_disk wrote"
    raise UserError(f"--source {source} {said}")


def _json(path: str) -> dict | None:
    """What a file holds; None where there is none."""
    try:
        with files.reading(path) as file:
            return json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UserError(f"{printable(path)}: is no JSON ({error}); save the data set again") from error


def _batches(index: int, source: Source, found: Found) -> Iterator[Range]:
    """Batches of records together up to SHARD bytes; all of a file that is damaged or has dictionaries between them."""
    whole = Range(index, found.path, 0, None, found.size or 0, False, found.version)
    try:
        with files.reading(found.path, files.ARROW_DAMAGE) as file:
            names = pyarrow.ipc.open_stream(pyarrow.PythonFile(file, mode="r")).schema.names
            messages = list(_messages(file))
    except (files.Unreadable, struct.error):
        yield whole
        return
    files.check_fields(source, found.path, "column", names)
    kinds, ends = [kind for kind, _, _ in messages], [end for _, _, end in messages]
    if kinds != [SCHEMA] + [RECORDS] * (len(kinds) - 1):
        yield whole
        return
    start = ends[0]
    for end in ends[1:]:
        if end - start >= source.shard or end == ends[-1]:
            yield whole._replace(start=start, end=end, size=end - start)
            start = end


def _messages(file: files.Watched) -> Iterator[tuple[int, int, int]]:
    """(kind, first byte, byte after the last) of each message of a stream; what it holds is not read."""
    start = 0
    while True:
        file.seek(start)
        head = file.read(8)
        if len(head) < 8:
            return
        continuation, length = struct.unpack("<Ii", head)
        if continuation != CONTINUATION or length == 0:
            return
        kind, body = _kind_and_body(file.read(length))
        yield kind, start, start + 8 + length + body
        start += 8 + length + body


def _kind_and_body(metadata: bytes) -> tuple[int, int]:
    """The kind of a message and the length of its body, from its Flatbuffer: a table whose fields are (version, kind,
    header, body's length)."""
    table = struct.unpack_from("<I", metadata)[0]
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    count = (struct.unpack_from("<H", metadata, fields)[0] - 4) // 2
    places = struct.unpack_from(f"<{count}H", metadata, fields + 4)
    kind = struct.unpack_from("<B", metadata, table + places[1])[0]
    body = struct.unpack_from("<q", metadata, table + places[3])[0] if count > 3 and places[3] else 0
    return kind, body


def _read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    for record in _records(source, part):
        yield from document_of(record, source, part.path, problems)


def _records(source: Source, part: Range) -> Iterator[dict]:
    with files.reading(part.path, files.ARROW_DAMAGE) as file:
        stream = pyarrow.PythonFile(file, mode="r")
        if part.end is None:
            for batch in pyarrow.ipc.open_stream(stream):
                yield from records(batch, source.columns)
            return
        schema = pyarrow.ipc.read_schema(stream)
        file.seek(part.start)
        while file.tell() < part.end:
            yield from records(pyarrow.ipc.read_record_batch(stream, schema), source.columns)


FORMAT = Format(Options, _ranges, _read, "DIR", segments_of, values=None)
