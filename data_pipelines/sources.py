"""`--source KIND:LOCATION`: find its files and cut the whole into units of work that depend on the source alone."""

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet

from data_pipelines import builtin, records
from data_pipelines.errors import UserError
from data_pipelines.files import is_compressed

KINDS = ("text", "jsonl", "parquet", "wikiextractor", "tfds", "builtin")
SHARD = 8 << 20  # bytes of source per unit of work
TFDS_SHARD = 10_000  # examples


@dataclass(frozen=True)
class Source:
    """Where documents come from and how to read them; `field` names the JSON key, column or feature with the text."""

    kind: str
    location: str
    field: str = "text"
    documents: str = "file"  # or "blank-line": what separates documents in text files
    undecodable: str = "replace"  # or "skip": what to do with a document that is not UTF-8
    tfds_dir: str | None = None


class Range(NamedTuple):
    """Part of a source: bytes of a plain file, row groups of Parquet, examples of TFDS; 0 and None: all of a file."""

    source: int  # index
    path: str
    start: int
    end: int | None
    size: int  # bytes, or a stand-in for them; for shards and progress
    continues: bool = False  # begins inside a document that began in the range before


def parse(spec: str, **options) -> Source:
    """The source a spec like 'text:corpus/*.txt' names. UserError for an unknown kind or a missing location."""
    kind, _, location = spec.partition(":")
    if kind not in KINDS:
        raise UserError(f"--source {spec}: unknown kind {kind!r}; use one of {', '.join(KINDS)}, as in text:DIR")
    if bool(location) != (kind != "builtin"):
        raise UserError(f"--source {spec}: " + ("builtin takes no location" if location else f"write {kind}:LOCATION"))
    if kind == "tfds" and ":" not in location:
        raise UserError(f"--source {spec}: write tfds:NAME:SPLIT, as in tfds:imdb_reviews:train")
    return Source(kind, location, **options)


def plan(sources: list[Source]) -> list[tuple[Range, ...]]:
    """Units of work of about SHARD bytes, in order. UserError for a source that is missing, empty or out of reach."""
    try:
        return list(_grouped(piece for index, source in enumerate(sources) for piece in _ranges(index, source)))
    except OSError as error:  # a broken link, a large file without permission
        reason = f"cannot read {error.filename} ({error.strerror})"
        raise UserError(f"--source: {reason}; make it readable or leave it out") from error


def _grouped(pieces: Iterable[Range]) -> Iterator[tuple[Range, ...]]:
    """Neighbours together up to SHARD bytes or 1,000 files."""
    group: list[Range] = []
    size = 0
    for piece in pieces:
        if group and (size + piece.size > SHARD or len(group) == 1000):
            yield tuple(group)
            group, size = [], 0
        group.append(piece)
        size += piece.size
    if group:
        yield tuple(group)


def _ranges(index: int, source: Source) -> Iterator[Range]:
    if source.kind == "tfds":
        count = len(records.tfds_examples(source))
        if not count:
            raise UserError(f"--source tfds:{source.location} has no examples; choose another split")
        for start in range(0, count, TFDS_SHARD):
            yield Range(index, source.location, start, min(start + TFDS_SHARD, count), SHARD)
        return
    for path in find_files(source):
        size = os.path.getsize(path)
        if source.kind == "parquet":
            yield from _row_groups(index, source, path)
        elif source.kind == "builtin" or is_compressed(path) or size <= SHARD or not _may_be_cut(source):
            yield Range(index, path, 0, None, size)
        else:
            cuts = _cuts(path, size, source)
            continues = source.kind == "text" and source.documents == "file"
            for start, end in zip(cuts, cuts[1:], strict=False):
                yield Range(index, path, start, end, end - start, continues and start > 0)


def find_files(source: Source) -> list[str]:
    """The files of a source, sorted: all below a directory, or what a glob matches; hidden files are left out."""
    if source.kind == "builtin":
        return [str(path) for path in builtin.files()]
    location = os.path.expanduser(source.location)
    if os.path.isdir(location):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(location) for name in names]
        relative = [(path, os.path.relpath(path, location)) for path in found]
        files = [path for path, name in relative if not any(part.startswith(".") for part in Path(name).parts)]
    elif os.path.exists(location):
        files = [location]
    else:
        files = [path for path in glob.glob(location, recursive=True) if os.path.isfile(path)]
    spec = f"--source {source.kind}:{source.location}"
    if not files:
        exists = "has no files" if os.path.isdir(location) else "does not exist, and as a pattern matches no file"
        raise UserError(f"{spec} {exists}; give a directory, a file or a quoted pattern such as 'DIR/**/*.txt'")
    if not any(os.path.getsize(path) for path in files):
        raise UserError(f"{spec}: all {len(files)} files are empty; give files with text")
    return sorted(files)


def _may_be_cut(source: Source) -> bool:
    # Whether a long document is to be skipped is known at its end only, so one reader must see all of it.
    return not (source.kind == "text" and source.documents == "file" and source.undecodable == "skip")


def _cuts(path: str, size: int, source: Source) -> list[int]:
    """Byte offsets from 0 to size, each but the last the start of a line, and of a document where documents are lines,
    paragraphs or <doc> blocks."""
    cuts = [0]
    with open(path, "rb") as file:
        while cuts[-1] + SHARD < size:
            file.seek(cuts[-1] + SHARD)
            line = _line(file)
            if source.kind == "wikiextractor":
                while (line := _line(file)) and not line.startswith(b"</doc>"):
                    pass
            elif source.kind == "text" and source.documents == "blank-line":
                while (line := _line(file)) and line.strip():
                    pass
            if file.tell() >= size:
                break
            cuts.append(file.tell())
    return [*cuts, size]


def _line(file) -> bytes:
    """The rest of a line, of which at most the first MiB is kept."""
    line = chunk = file.readline(1 << 20)
    while chunk and not chunk.endswith(b"\n"):
        chunk = file.readline(1 << 20)
    return line


def _row_groups(index: int, source: Source, path: str) -> Iterator[Range]:
    try:
        metadata = pyarrow.parquet.ParquetFile(path).metadata
        schema = metadata.schema.to_arrow_schema()
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except (OSError, ValueError, pyarrow.ArrowException):
        yield Range(index, path, 0, None, os.path.getsize(path))  # its reader counts it as unreadable
        return
    if source.field not in schema.names:
        columns = ", ".join(schema.names)
        raise UserError(f"--field {source.field}: {path} has no such column; it has {columns}")
    start, size = 0, 0
    for group, bytes_ in enumerate(sizes):
        size += bytes_
        if size >= SHARD or group + 1 == len(sizes):
            yield Range(index, path, start, group + 1, size)
            start, size = group + 1, 0
