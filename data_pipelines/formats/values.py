"""Values of documents, `prepare --values year count:int score:float url:text`: which are kept, and as what."""

import math
from typing import NamedTuple

import numpy as np

from data_pipelines.document import Document
from data_pipelines.errors import UserError, nearest
from data_pipelines.formats.problems import Problems, printable
from data_pipelines.store.fields import TEXT, Field

MISSING = int(np.iinfo(np.int64).min)  # where a document has no number
CODE = "code"  # the value that `--code` and `--code-field` give
# A label is one of a few texts, stored as its number; a text is itself
KINDS = {
    "label": Field("uint16", per="document", values=()),
    "int": Field("int64", per="document"),
    "float": Field("float32", per="document"),
    "text": Field("uint8", per="document", kept=TEXT, values=()),
}
LARGEST = float(np.finfo(np.float32).max)
WITHOUT = {"int": MISSING, "float": math.nan}  # what a document has without one; "" of other kinds


class Value(NamedTuple):
    """field: of a record, that has it; None: all documents have the only one that is known.   known: those that there
    may be, () for any.   prefix: whether its token stands before each document."""

    name: str
    kind: str = "label"
    field: str | None = None
    known: tuple[str, ...] = ()
    prefix: bool = False

    @property
    def option(self) -> str:
        return "--code-field" if self.name == CODE else "--values"


def parse_value(spec: str, prefix: str | None) -> Value:
    """FIELD or FIELD:KIND, of the name FIELD in small letters. UserError for another kind."""
    field, _, kind = spec.partition(":")
    if kind and kind not in KINDS:
        raise UserError(f"--values {spec}: no kind is {kind!r}; use one of {', '.join(KINDS)}, as in {field}:int")
    return Value(field.lower(), kind or "label", field, prefix=field.lower() == prefix)


def kept(document: Document, values: tuple[Value, ...], where: str, problems: Problems) -> dict[str, object]:
    """Those of a document's values that are kept, by name; what it has not, or not of its kind, is counted. UserError
    for one that is not known."""
    found = {}
    for name, kind, field, known, _ in values:
        has = document.values.get(field) if field else known[0]
        found[name] = _read(has, kind)
        if known and found[name] not in known:
            raise UserError(
                f"{printable(where)}: its {field} is {printable(str(has))!r}, which no --code names; the nearest is "
                f"{nearest(str(has), known)!r}: give --code for each code that there is"
            )
        if found[name] is None:
            found[name] = WITHOUT.get(kind, "")
            if not document.continues:
                problems.note(f"documents without {name}:{kind}", where)
    return found


def _read(found: object, kind: str) -> str | int | float | None:
    """What a record has as one of a kind, None where it is none."""
    try:
        if kind == "float":
            number = float(found)
            return number if abs(number) <= LARGEST else None
        if kind == "int":
            number = int(np.int64(int(found)))  # in its range
            return number if isinstance(found, str | bytes) or number == found else None
    except (ValueError, TypeError, OverflowError):
        return None
    if found is None or isinstance(found, list | dict | np.ndarray):
        return None
    text = found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
    return text.encode("utf-8", "replace").decode() or None
