"""`parquet:` files of which each row is a document, with the text in a column."""

import os
from collections.abc import Iterator, Sequence

import pyarrow
import pyarrow.parquet

from data_pipelines.document import Document
from data_pipelines.formats import files
from data_pipelines.formats import source as sizes
from data_pipelines.formats.jsonl import Options
from data_pipelines.formats.source import Format, Range, Source
from data_pipelines.formats.texts import document_of, segments_of


def _ranges(index: int, source: Source, problems, exclude: Sequence[str]) -> Iterator[Range]:
    for path in files.find(source, problems, exclude):
        yield from _row_groups(index, source, path)


def _row_groups(index: int, source: Source, path: str) -> Iterator[Range]:
    try:
        metadata = pyarrow.parquet.ParquetFile(path).metadata
        schema = metadata.schema.to_arrow_schema()
        group_sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except (OSError, ValueError, pyarrow.ArrowException):
        yield Range(index, path, 0, None, os.path.getsize(path))  # its reader counts it as unreadable
        return
    files.check_fields(source, path, "column", schema.names)
    start, size = 0, 0
    for group, bytes_ in enumerate(group_sizes):
        size += bytes_
        if size >= sizes.SHARD or group + 1 == len(group_sizes):
            yield Range(index, path, start, group + 1, size)
            start, size = group + 1, 0


def _read(source: Source, part: Range, problems) -> Iterator[Document]:
    try:
        file = pyarrow.parquet.ParquetFile(part.path)
        groups = range(part.start, file.num_row_groups if part.end is None else part.end)
        for batch in file.iter_batches(batch_size=1024, row_groups=list(groups), columns=list(source.options.fields)):
            for record in batch.to_pylist():
                yield from document_of(record, source, part.path, problems)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise files.Unreadable(str(error).splitlines()[0]) from error


FORMAT = Format(Options, _ranges, _read, location="PATTERN", segments=segments_of)
