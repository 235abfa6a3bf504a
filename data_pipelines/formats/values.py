"""Values of documents, `prepare --values year count:int score:float url:text`: which are kept, and with which type."""

import math
from typing import NamedTuple

import numpy as np

from data_pipelines.document import Document
from data_pipelines.errors import UserError, nearest
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.store.fields import TEXT, Field

MISSING = int(np.iinfo(np.int64).min)  # stands for a missing number
CODE = "code"  # the value that `--code` and `--code-field` give
# A label is one of a few texts and stored as a number; a text is stored as it is
KINDS = {
    "label": Field("uint16", per="document", values=()),
    "int": Field("int64", per="document"),
    "float": Field("float32", per="document"),
    "text": Field("uint8", per="document", kept=TEXT, values=()),
}
LARGEST = float(np.finfo(np.float32).max)
WITHOUT = {"int": MISSING, "float": math.nan}  # the value of a document without one; "" for other kinds


class Value(NamedTuple):
    """field: of the record, with the value; None: all documents have the only known value.   known: the values that may
    occur, () for any.   prefix: whether the value's token stands before each document."""

    name: str
    kind: str = "label"
    field: str | None = None
    known: tuple[str, ...] = ()
    prefix: bool = False

    @property
    def option(self) -> str:
        return "--code-field" if self.name == CODE else "--values"


def parse_value(spec: str, prefix: str | None) -> Value:
    """Parse FIELD or FIELD:KIND; the value's name is FIELD in small letters. Raises UserError for another kind."""
    field, _, kind = spec.partition(":")
    if kind and kind not in KINDS:
        raise UserError(f"--values {spec}: {kind!r} is not a kind; use one of {', '.join(KINDS)}, as in {field}:int")
    return Value(field.lower(), kind or "label", field, prefix=field.lower() == prefix)


def kept(document: Document, values: tuple[Value, ...], where: str, problems: Problems) -> dict[str, object]:
    """Return the values to keep of a document, by name. A value that is missing, or not of its kind, is counted. Raises
    UserError for a value that is not among the known ones."""
    found = {}
    for name, kind, field, known, _ in values:
        value = document.values.get(field) if field else known[0]
        found[name] = _read(value, kind)
        if known and found[name] not in known:
            raise UserError(
                f"{printable(where)}: its {field} is {printable(str(value))!r}, which no --code names; the nearest is "
                f"{nearest(str(value), known)!r}: give --code for each code that occurs"
            )
        if found[name] is None:
            found[name] = WITHOUT.get(kind, "")
            if not document.continues:
                problems.note(f"documents without {name}:{kind}", where)
    return found


def _read(found: object, kind: str) -> str | int | float | None:
    """Return a record's value as one of a kind, None if it is not of that kind."""
    try:
        if kind == "float":
            number = float(found)
            return number if abs(number) <= LARGEST else None
        if kind == "int":
            number = int(np.int64(int(found)))  # OverflowError outside int64
            return number if isinstance(found, str | bytes) or number == found else None
    except (ValueError, TypeError, OverflowError):
        return None
    if found is None or isinstance(found, list | dict | np.ndarray):
        return None
    text = found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
    return text.encode("utf-8", "replace").decode() or None
