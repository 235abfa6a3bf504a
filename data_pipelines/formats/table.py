"""The formats of sources, `--source KIND:LOCATION`. A new one is a file here with a FORMAT, and its name below."""

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

KINDS = ("text", "jsonl", "parquet", "arrow", "wikiextractor", "fasta", "conll", "parallel", "dialogue")
KINDS += ("tfds", "builtin")
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
    """Return the source that a spec like 'text:corpus/*.txt' names. Of the settings it takes those that are options of
    its format. unit: bytes of text in a unit of work. language, values, task_prefix: see Source. Raises UserError for
    an unknown kind, a location of another form, or values, languages or a task prefix that do not fit its documents."""
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
    field_names = FORMATS[kind].values
    for value in values if field_names is not None else ():
        if value.field and value.field not in field_names:
            problem = f"has no such field but {', '.join(field_names)}" if field_names else "has no fields"
            raise UserError(f"{value.option} {value.field}: --source {spec} {problem}; leave it out")
    segments, languages = FORMATS[kind].segments(options), language.split(",")
    if again := [name for at, name in enumerate(segments) if name in segments[:at]]:
        raise UserError(f"--field {again[0]}: is given twice, but each is a separate segment; give it once")
    if len(languages) not in (1, len(segments)):
        raise UserError(f"--language {language}: --source {spec} has texts of {', '.join(segments)}; give one language")
    if task_prefix and len(segments) < 2:
        raise UserError(
            f"--task-prefix {task_prefix!r}: stands before inputs that have targets, but --source {spec} has "
            f"{', '.join(segments)}; give --field INPUT --field TARGET, or leave it out"
        )
    return Source(kind, location, options, language, unit, values, task_prefix)


def plan(sources: list[Source], problems: Problems, exclude: Sequence[str] = ()) -> list[tuple[Range, ...]]:
    """Return units of work of about SHARD bytes, in order; they depend on the sources alone. Files below excluded paths
    are left out. Raises UserError for a source that is missing, empty or out of reach."""
    try:
        each = (FORMATS[source.kind].ranges(source, problems, exclude) for source in sources)
        numbered = (part._replace(source=index) for index, ranges in enumerate(each) for part in ranges)
        return list(_grouped(sources, numbered))
    except (FileNotFoundError, PermissionError) as error:  # a broken link, a file without permission
        reason = f"{printable(str(error.filename))} ({error.strerror})" if error.filename else f"a file ({error})"
        raise UserError(f"--source: cannot read {reason}; make it readable or leave it out") from error


def read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    """Yield the documents of one range of a source. Documents without tokens are counted later."""
    try:
        for document in FORMATS[source.kind].read(source, part, problems):
            if source.values or document.values:
                document = document._replace(values=kept(document, source.values, part.path, problems))
            yield document
    except Unreadable as error:
        problems.note(UNREADABLE, f"{part.path}: {error}")


def changed(part: Range) -> str | None:
    """Return a file of the range whose content has changed since the range was planned, or None."""
    files = (part.path, part.version), *([(part.other.path, part.other.version)] if part.other else [])
    return next((path for path, planned in files if planned and look(path).version != planned), None)


def _grouped(sources: list[Source], ranges: Iterable[Range]) -> Iterator[tuple[Range, ...]]:
    """Group neighbouring ranges up to a shard or MOST_FILES files."""
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
