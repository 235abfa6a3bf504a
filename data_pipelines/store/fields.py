"""Fields: what a corpus stores of its tokens, sentences and documents beside the tokens."""

import re
from typing import NamedTuple

import numpy as np

from data_pipelines.errors import UserError

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # it becomes a file name
TAKEN = ("documents", "sentences", "token_counts")  # arrays that are not fields
STORED, BY_TOKEN, BY_TOKEN_BEFORE, TEXT = "stored", "by token", "by the token before", "text"
PLANNED = ("tokens", "word_starts", "sources", "languages", "segments", "segment_languages")  # known before any text
LARGEST_IN_TWO_BYTES = 65536


class Field(NamedTuple):
    """dtype: of the stored array. shape: of one value. per: 'token', 'sentence' or 'document'. kept: STORED; or looked
    up in a table with one value per token of the vocabulary, BY_TOKEN or BY_TOKEN_BEFORE (by the token before; the
    first token has True); or TEXT, the bytes of all texts, with a second file of where each begins. values: the texts
    that numbers stand for (in units of work those of TEXT too), () if the parts bring them; None if a number stands for
    itself. prefix: whether each value has a token that stands before documents."""

    dtype: str
    shape: tuple[int, ...] = ()
    per: str = "token"
    kept: str = STORED
    values: tuple[str, ...] | None = None
    prefix: bool = False

    def to_json(self) -> dict:
        result = {"dtype": self.dtype, "shape": list(self.shape), "per": self.per, "kept": self.kept}
        result |= {} if self.values is None else {"values": list(self.values)}
        return result | ({"prefix": True} if self.prefix else {})

    @classmethod
    def of_json(cls, said: dict) -> "Field":
        values = None if said.get("values") is None else tuple(said["values"])
        prefix = said.get("prefix", False)
        return cls(np.dtype(said["dtype"]).name, tuple(said["shape"]), said["per"], said["kept"], values, prefix)


def token_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= LARGEST_IN_TWO_BYTES else "uint32"


def valued(fields: dict[str, Field]) -> dict[str, Field]:
    """Return the fields that values of documents fill."""
    return {name: field for name, field in fields.items() if name not in PLANNED and field.per == "document"}


def check_name(name: str, taken: tuple[str, ...] = TAKEN) -> str:
    """Return the name of a field, which becomes a file name. Raises UserError for a name that cannot."""
    if not NAME.fullmatch(name) or name in taken:
        raise UserError(f"field {name!r}: use a name of small letters, digits and _, but not {', '.join(taken)}")
    return name


def check_values(name: str, field: Field, number: int) -> None:
    """Raise UserError if a part has more different texts of a field than its numbers can tell apart."""
    most = int(np.iinfo(field.dtype).max) + 1
    if number > most and field.kept == STORED:
        cure = f"give --values {name}:text" if field.per == "document" else "leave it out (conll: --label-column 0)"
        raise UserError(f"field {name!r} has more than {most:,} different values in a part; {cure}")
