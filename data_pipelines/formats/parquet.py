"""`parquet:` files in which each row is a document, with the text in a column."""

from collections.abc import Iterator

import pyarrow
import pyarrow.parquet

from data_pipelines.document import Document
from data_pipelines.formats import files
from data_pipelines.formats.cutting import documents_of, segments_of
from data_pipelines.formats.jsonl import Options
from data_pipelines.formats.listing import Found
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import Format, Range, Source

SUFFIXES = (".parquet",)
BATCH = 4 << 20  # bytes of text in a batch of rows, approximately
MOST_ROWS = 64  # in a batch, since rows differ in size


def _row_groups(source: Source, found: Found) -> Iterator[Range]:
    try:
        with files.reading(found.path, files.ARROW_DAMAGE) as file:
            opened = _open(file)
            metadata, names = opened.metadata, opened.schema_arrow.names
    except files.Unreadable:
        yield files.uncut(found)  # the reader counts it
        return
    files.check_fields(source, found.path, "column", names)
    start, size = 0, 0
    for group in range(metadata.num_row_groups):
        size += _bytes(metadata, group, source)
        if size >= source.shard or group + 1 == metadata.num_row_groups:
            yield files.uncut(found)._replace(start=start, end=group + 1, size=size)
            start, size = group + 1, 0


def _open(file: files.Watched) -> pyarrow.parquet.ParquetFile:
    # Read page by page: whole columns of a group, or groups ahead, may not fit in memory.
    return pyarrow.parquet.ParquetFile(pyarrow.PythonFile(file, mode="r"), buffer_size=files.BLOCK, pre_buffer=False)


def _bytes(metadata, group: int, source: Source) -> int:
    """Return the bytes of the fields' columns in a row group."""
    columns = map(metadata.row_group(group).column, range(metadata.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema in source.options.fields)


def _read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    with files.reading(part.path, files.ARROW_DAMAGE) as file:
        opened = _open(file)
        for group in range(part.start, opened.num_row_groups if part.end is None else part.end):
            each = _bytes(opened.metadata, group, source) // max(opened.metadata.row_group(group).num_rows, 1)
            rows = max(1, min(MOST_ROWS, BATCH // max(each, 1)))
            for batch in opened.iter_batches(rows, [group], list(source.columns), use_threads=False):
                yield from documents_of(batch, source, part, problems)


FORMAT = Format(Options, files.of_files(_row_groups, SUFFIXES), _read, segments=segments_of, values=None)
