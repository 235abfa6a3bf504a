"""Reads the files of a task as records with their line numbers. Malformed input is one error that names its line."""

import csv
import json
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipelines.errors import UserError

FORMS = {".tsv": "tab", ".csv": "comma", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}

Told = defaultdict[str, list[str]]  # warning about examples -> file and line of each
log = logging.getLogger(__name__)


class Record(NamedTuple):
    """where: file and line, the beginning of an error message."""

    where: str
    fields: dict[str, Any]


def records(file: Path, columns: Mapping[str, str]) -> list[Record]:
    """Return the records of a .tsv or .csv file with a header line, or of a .jsonl or .parquet file.
    .tsv files have no quotes, like GLUE's; .csv files have quotes.   columns: the columns to read -> the options that
    name them.   UserError if a record lacks a column or the file cannot be read."""
    form = FORMS.get(file.suffix)
    if form is None:
        raise UserError(f"{file}: is not a file of records; give one that ends in {', '.join(FORMS)}")
    read = {"tab": _tab, "comma": _comma, "json": _json, "parquet": _parquet}[form]
    content = _named(file, read(file)) if form in ("tab", "comma") else read(file)
    found = []
    for number, fields in with_errors(file, content):
        where = f"{file}, line {number}"
        fields = {name: None if value != value else value for name, value in fields.items()}  # NaN: missing
        if lacking := [name for name in columns if fields.get(name) is None]:
            present = ", ".join(name for name, value in fields.items() if value is not None) or "nothing"
            options = " and ".join(dict.fromkeys(columns[name] for name in lacking))
            none = " and no ".join(lacking)
            raise UserError(f"{where}: has no {none}, but has {present}; name columns with {options}")
        found.append(Record(where, fields))
    if not found:
        raise UserError(f"{file}: has no records; give another file")
    return found


def as_text(record: Record, name: str, value: Any) -> str:
    """Return the value of a field, or an item of its list, as text. UserError if missing, a list, an object, or half of
    a character, which JSON can escape."""
    if value is None or value != value or isinstance(value, list | dict):
        raise UserError(f"{record.where}: {name}={value!r} is not a text; correct it")
    text = str(value)
    if re.search("[\ud800-\udfff]", text):
        raise UserError(f"{record.where}: {name} has a lone surrogate, which is no character; correct it")
    return text


def tell(told: Told) -> None:
    """Log each warning once, with the number of examples and the place of the first one."""
    for warning, wheres in told.items():
        log.warning("%s: %s, the first is %s", warning, f"{len(wheres):,}", wheres[0])


def with_errors(file: Path, read: Iterator) -> Iterator:
    """Yield what `read` yields; UserError if the file cannot be read."""
    try:
        yield from read
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}); give another file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not UTF-8 at byte {error.start}; convert it to UTF-8") from None


def text_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file. Only line feeds, carriage returns or both end a line."""
    with file.open(encoding="utf-8-sig", newline=None) as lines:
        for line in lines:
            yield line.removesuffix("\n")


def _tab(file: Path) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t") if line else []) for number, line in enumerate(text_lines(file), 1))


def _named(file: Path, lines: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, dict]]:
    """Yield the values of each line by column name, with the names from the first line. Blank lines are skipped; in a
    file with one column they may be empty values, so a blank line before others is an error there."""
    names, blank = [], 0
    for number, values in lines:
        if not values:
            blank = number
        elif not names:
            names, blank = values, 0
            if twice := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{file}, line 1: has two columns {twice[0]!r}; rename one of them")
        elif len(values) != len(names):
            raise UserError(f"{file}, line {number}: has {len(values)} columns, but the first line has {len(names)}")
        elif blank and len(names) == 1:
            raise UserError(f"{file}, line {blank}: is blank; give it a {names[0]}, or remove the line")
        else:
            yield number, dict(zip(names, values, strict=True))


def _comma(file: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(sys.maxsize)  # the default limit is 131,072 characters
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            for values in reader:
                yield reader.line_num, values
        except csv.Error as error:
            raise UserError(f"{file}, line {reader.line_num}: {error}; close the quotes") from None


def _json(file: Path) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(text_lines(file), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: is not JSON ({error}); give one object a line") from None
        if not isinstance(fields, dict):
            raise UserError(f"{file}, line {number}: is not a JSON object; give one object a line")
        yield number, fields


def _parquet(file: Path) -> Iterator[tuple[int, dict]]:
    import pyarrow
    from pyarrow import parquet

    try:
        yield from enumerate(parquet.read_table(file).to_pylist(), 1)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file}: cannot be read ({error}); give another file") from None
