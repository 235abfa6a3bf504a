"""`arrow:` a data set written by Hugging Face's `save_to_disk`: a folder with state.json, which names files that are
Arrow IPC streams. Read with pyarrow alone."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pyarrow

from data_pipelines.cloud import is_remote
from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.formats import files
from data_pipelines.formats.cutting import documents_of, segments_of
from data_pipelines.formats.jsonl import Options
from data_pipelines.formats.listing import look
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.formats.source import Format, Range, Source


def _ranges(source: Source, problems: Problems, exclude: Sequence[str]) -> Iterator[Range]:
    return files.each(_data_files(source), _batches, source)


def _data_files(source: Source) -> list[str]:
    folder = source.location.rstrip("/")
    folder = folder if is_remote(folder) else os.path.expanduser(folder)
    state = _json(f"{folder}/state.json")
    if state is not None:
        return [f"{folder}/{file['filename']}" for file in state["_data_files"]]
    splits = _json(f"{folder}/dataset_dict.json")
    if splits is not None:
        first = splits["splits"][0]
        problem = f"holds the splits {', '.join(splits['splits'])}; name one, as in arrow:{source.location}/{first}"
    else:
        problem = "has no state.json; give a folder that a data set's save_to_disk wrote"
    raise UserError(f"--source {source} {problem}")


def _json(path: str) -> dict | None:
    """Return the JSON in a file, None if there is no file."""
    try:
        with files.reading(path) as file:
            return json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UserError(f"{printable(path)}: is not JSON ({error}); save the data set again") from error


def _batches(source: Source, path: str) -> Iterator[Range]:
    """Yield groups of record batches up to SHARD bytes; all of a file that is damaged or has dictionaries."""
    found, ends = look(path), []
    with suppress(files.Unreadable), files.reading(path, files.ARROW_DAMAGE) as file:
        names = pyarrow.ipc.open_stream(pyarrow.PythonFile(file, mode="r")).schema.names
        files.check_fields(source, path, "column", names)
        ends = _ends(file)
    whole = files.uncut(found)
    if not ends or ends[-1] > (found.size or 0):
        yield whole
        return
    start = ends[0]
    for end in ends[1:]:
        if end - start >= source.shard or end == ends[-1]:
            yield whole._replace(start=start, end=end, size=end - start)
            start = end


class _Heads:
    """A file of which little is read: the answer to a long read, as of a message's body, is zeros."""

    closed = False

    def __init__(self, file: files.Watched):
        self.file, self.tell = file, file.tell

    def read(self, size: int) -> bytes:
        if size <= files.LOOK:
            return self.file.read(size)
        self.file.seek(size, os.SEEK_CUR)
        return bytes(size)


def _ends(file: files.Watched) -> list[int]:
    """Return where the schema and each record batch of a stream end; [] if there is anything else among them."""
    file.seek(0)
    heads, ends = _Heads(file), []
    stream = pyarrow.PythonFile(heads, mode="r")
    with suppress(EOFError):
        while pyarrow.ipc.read_message(stream).type == ("record batch" if ends else "schema"):
            ends.append(heads.tell())
        return []
    return ends


def _read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    with files.reading(part.path, files.ARROW_DAMAGE) as file:
        stream = pyarrow.PythonFile(file, mode="r")
        if part.end is None:
            for batch in pyarrow.ipc.open_stream(stream):
                yield from documents_of(batch, source, part, problems)
            return
        schema = pyarrow.ipc.read_schema(stream)
        file.seek(part.start)
        while file.tell() < part.end:
            yield from documents_of(pyarrow.ipc.read_record_batch(stream, schema), source, part, problems)


FORMAT = Format(Options, _ranges, _read, "DIR", segments_of, values=None)
