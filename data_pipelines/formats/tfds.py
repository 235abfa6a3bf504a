"""`tfds:NAME:SPLIT` the examples of a TFDS data set, read without TensorFlow."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.formats import files, jsonl
from data_pipelines.formats.cutting import document_of, segments_of
from data_pipelines.formats.source import Format, Range, Source

EXAMPLES = 10_000  # most examples in a range


@dataclass(frozen=True)
class Options(jsonl.Options):
    """Where the data set is, and which features hold the text."""

    tfds_dir: str | None = None


def _ranges(source: Source, problems, exclude: Sequence[str]) -> Iterator[Range]:
    examples = _examples(source)
    count, info = len(examples), examples.dataset_info
    if not count:
        raise UserError(f"--source {source} has no examples; choose another split")
    files.check_fields(source, source.location, "feature", list(info.features))
    each = max(1, int(info.dataset_size) // max(info.splits.total_num_examples, 1))  # bytes
    step = max(1, min(EXAMPLES, source.shard // each))
    for start in range(0, count, step):
        end = min(start + step, count)
        yield Range(0, source.location, start, end, (end - start) * each)


def _read(source: Source, part: Range, problems) -> Iterator[Document]:
    examples = _examples(source)
    for index in range(part.start, part.end):
        try:
            record = examples[index]
        except OSError:
            raise
        except Exception as error:  # a damaged file may raise anything
            raise files.Unreadable(str(error).splitlines()[0]) from error
        yield from document_of(record, source, f"{part.path}, example {index}", problems)


@functools.cache
def _examples(source: Source):
    """Return the random-access examples of 'NAME:SPLIT', downloaded and built as array_record if needed."""
    import tensorflow_datasets  # slow to import, and only needed here

    name, _, split = source.location.rpartition(":")
    try:
        return tensorflow_datasets.data_source(
            name, split=split, data_dir=source.options.tfds_dir, builder_kwargs={"file_format": "array_record"}
        )
    except Exception as error:  # anything from a wrong name to a missing dependency of one data set
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"--source tfds:{source.location} cannot be opened: {reason}; see --tfds-dir") from error


FORMAT = Format(Options, _ranges, _read, location="NAME:SPLIT", segments=segments_of, values=None)
