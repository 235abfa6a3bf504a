"""Files of a task as records with the line that each is on. What is malformed is one error that names it."""

import csv
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipelines.errors import UserError

FORMS = {".tsv": "tab", ".csv": "comma", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}


Told = defaultdict[str, list[str]]  # what there is to say of examples -> where they are
log = logging.getLogger(__name__)


class Record(NamedTuple):
    """where: the file and line, as an error begins."""

    where: str
    fields: dict[str, Any]


def records(file: Path, columns: Mapping[str, str]) -> list[Record]:
    """Of .tsv and .csv files with a line of names, .jsonl and .parquet files.

    .tsv files have no quotes, as those of GLUE; .csv files have quotes.   columns: those that are read, and the options
    that name them.   UserError where one lacks a column or cannot be read.
    """
    form = FORMS.get(file.suffix)
    if form is None:
        raise UserError(f"{file}: is no file of records; give one that ends in {', '.join(FORMS)}")
    read = {"tab": _tab, "comma": _comma, "json": _json, "parquet": _parquet}[form]
    found = []
    for number, fields in with_errors(file, read(file)):
        where = f"{file}, line {number}"
        fields = {name: None if value != value else value for name, value in fields.items()}  # NaN: it is missing
        if lacking := [name for name in columns if fields.get(name) is None]:
            there = ", ".join(name for name, value in fields.items() if value is not None) or "nothing"
            options = " and ".join(dict.fromkeys(columns[name] for name in lacking))
            raise UserError(f"{where}: has no {' and no '.join(lacking)}; it has {there}; name others with {options}")
        found.append(Record(where, fields))
    if not found:
        raise UserError(f"{file}: has no record; give another file")
    return found


def as_text(record: Record, name: str, value: Any) -> str:
    """A value of a field, or of a list there. UserError where it is missing or holds further ones."""
    if value is None or value != value or isinstance(value, list | dict):
        raise UserError(f"{record.where}: {name} has {value!r} in place of a text; mend it")
    return str(value)


def tell(told: Told) -> None:
    """Say it, once each, with how many there are and where the first one is."""
    for what, wheres in told.items():
        log.warning("%s: %s, the first of %s", what, f"{len(wheres):,}", wheres[0])


def with_errors(file: Path, read: Iterator) -> Iterator:
    """What is read of a file; UserError where it cannot be."""
    try:
        yield from read
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}); give another file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is no UTF-8 at byte {error.start}; write it so") from None


def text_lines(file: Path) -> Iterator[str]:
    """The lines of a text, which end with line feeds, carriage returns or both, alone."""
    with file.open(encoding="utf-8-sig", newline=None) as lines:
        for line in lines:
            yield line.removesuffix("\n")


def _tab(file: Path) -> Iterator[tuple[int, dict]]:
    return _named(file, ((number, line.split("\t") if line else []) for number, line in enumerate(text_lines(file), 1)))


def _named(file: Path, lines: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, dict]]:
    """Lines as values -> by the names of the first one. Blank lines are none, but where a file has one column they may
    be an empty value: such a line with others behind it is an error."""
    names, blank = [], 0
    for number, values in lines:
        if not values:
            blank = number
        elif not names:
            names, blank = _apart(file, values), 0
        elif len(values) != len(names):
            raise UserError(f"{file}, line {number}: has {len(values)} columns, the first line {len(names)}")
        elif blank and len(names) == 1:
            raise UserError(f"{file}, line {blank}: is blank; give it a {names[0]}, or leave the line out")
        else:
            yield number, dict(zip(names, values, strict=True))


def _apart(file: Path, names: list[str]) -> list[str]:
    """The names of a file's columns, of which none is there twice."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{file}, line 1: has two columns {twice[0]!r}; rename one of them")
    return names


def _comma(file: Path) -> Iterator[tuple[int, dict]]:
    return _named(file, _quoted(file))


def _quoted(file: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(sys.maxsize)  # by default a text may have 131,072 characters
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            for values in reader:
                yield reader.line_num, values
        except csv.Error as error:
            raise UserError(f"{file}, line {reader.line_num}: {error}; close its quotes") from None


def _json(file: Path) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(text_lines(file), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: is not JSON ({error}); give an object a line") from None
        if not isinstance(fields, dict):
            raise UserError(f"{file}, line {number}: is no JSON object; give one a line")
        yield number, fields


def _parquet(file: Path) -> Iterator[tuple[int, dict]]:
    import pyarrow
    from pyarrow import parquet

    try:
        yield from enumerate(parquet.read_table(file).to_pylist(), 1)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file}: cannot be read ({error}); give another file") from None
