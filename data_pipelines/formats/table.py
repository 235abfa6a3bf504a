"""Formats of sources, `--source KIND:LOCATION`. A new one is a file here that holds a FORMAT, and its name below."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from importlib import import_module

from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.formats.files import Unreadable
from data_pipelines.formats.listing import look
from data_pipelines.formats.problems import UNREADABLE, Problems, printable
from data_pipelines.formats.source import Format, Range, Source
from data_pipelines.formats.values import Value, kept

KINDS = ("text", "jsonl", "parquet", "arrow", "wikiextractor", "fasta", "conll", "parallel", "tfds", "builtin")
FORMATS: dict[str, Format] = {kind: import_module(f"data_pipelines.formats.{kind}").FORMAT for kind in KINDS}
MOST_FILES = 1000  # in a unit of work


def parse(
    spec: str,
    language: str = "en",
    unit: int | None = None,
    values: tuple[Value, ...] = (),
    task_prefix: str = "",
    **settings,
) -> Source:
    """The source a spec like 'text:corpus/*.txt' names; of the settings it takes those that are options of its format.
    unit: bytes of text in a unit of work. language, values, task_prefix: see Source. UserError for an unknown kind, a
    location of another form, or values, languages and an input that its documents have not."""
    kind, _, location = spec.partition(":")
    if kind not in FORMATS:
        raise UserError(f"--source {spec}: unknown kind {kind!r}; use one of {', '.join(FORMATS)}, as in text:DIR")
    form = FORMATS[kind].location
    if location and not form:
        raise UserError(f"--source {spec}: {kind} takes no location")
    if form and (not location or ":" in form and ":" not in location):
        raise UserError(f"--source {spec}: write {kind}:{form}")
    known = {field.name for field in fields(FORMATS[kind].options)}
    options = FORMATS[kind].options(**{name: value for name, value in settings.items() if name in known})
    has = FORMATS[kind].values
    for value in values if has is not None else ():
        if value.field and value.field not in has:
            said = f"has no such field but {', '.join(has)}" if has else "has no fields"
            raise UserError(f"{value.option} {value.field}: --source {spec} {said}; leave it out")
    segments, languages = FORMATS[kind].segments(options), language.split(",")
    if again := [name for at, name in enumerate(segments) if name in segments[:at]]:
        raise UserError(f"--field {again[0]}: is given twice, and each is a segment of its own; give it once")
    if len(languages) not in (1, len(segments)):
        raise UserError(f"--language {language}: --source {spec} has documents of {', '.join(segments)}; give one")
    if task_prefix and len(segments) < 2:
        raise UserError(
            f"--task-prefix {task_prefix!r}: stands before inputs that have targets, and --source {spec} has "
            f"{', '.join(segments)}; give --field INPUT --field TARGET, or leave it out"
        )
    return Source(kind, location, options, language, unit, values, task_prefix)


def plan(sources: list[Source], problems: Problems, exclude: Sequence[str] = ()) -> list[tuple[Range, ...]]:
    """Units of work of about SHARD bytes, in order, which depend on the sources alone; what lies below the excluded
    paths is no part of them. UserError for a source that is missing, empty or out of reach."""
    try:
        each = (FORMATS[source.kind].ranges(source, problems, exclude) for source in sources)
        numbered = (part._replace(source=index) for index, ranges in enumerate(each) for part in ranges)
        return list(_grouped(sources, numbered))
    except (FileNotFoundError, PermissionError) as error:  # a broken link, a file without permission
        reason = f"{printable(str(error.filename))} ({error.strerror})" if error.filename else f"a file ({error})"
        raise UserError(f"--source: cannot read {reason}; make it readable or leave it out") from error


def read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    """The documents of one range of a source; an empty one is counted by whoever finds that it has no tokens."""
    try:
        for document in FORMATS[source.kind].read(source, part, problems):
            if source.values or document.values:
                document = document._replace(values=kept(document, source.values, part.path, problems))
            yield document
    except Unreadable as error:
        problems.note(UNREADABLE, f"{part.path}: {error}")


def changed(part: Range) -> str | None:
    """A file of the range whose content has changed since it was planned."""
    files = (part.path, part.version), *([(part.other.path, part.other.version)] if part.other else [])
    return next((path for path, planned in files if planned and look(path).version != planned), None)


def _grouped(sources: list[Source], ranges: Iterable[Range]) -> Iterator[tuple[Range, ...]]:
    """Neighbours together up to a shard or MOST_FILES files."""
    group: list[Range] = []
    size = 0
    for part in ranges:
        if group and (size + part.size > sources[part.source].shard or len(group) == MOST_FILES):
            yield tuple(group)
            group, size = [], 0
        group.append(part)
        size += part.size
    if group:
        yield tuple(group)
