"""What a corpus says of its tokens, sentences and documents beside the tokens themselves."""

import re
from typing import NamedTuple

import numpy as np

from data_pipelines.errors import UserError

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # it becomes a file's name
TAKEN = ("documents", "sentences", "token_counts")  # arrays that are no fields
STORED, BY_TOKEN, BY_TOKEN_BEFORE = "stored", "by token", "by the token before"
PLANNED = ("tokens", "word_starts", "sources", "languages", "segments", "codes")  # known before any text is read
LARGEST_IN_TWO_BYTES = 65536


class Field(NamedTuple):
    """dtype: of the stored array. shape: of one value. per: 'token', 'sentence' or 'document'. kept: STORED, or
    looked up in a table of one value per token of the vocabulary: BY_TOKEN, or BY_TOKEN_BEFORE, where the first
    token has True. values: the texts that the numbers stand for, () where the parts bring them; None where a number is
    itself."""

    dtype: str
    shape: tuple[int, ...] = ()
    per: str = "token"
    kept: str = STORED
    values: tuple[str, ...] | None = None

    def to_json(self) -> dict:
        said = {"dtype": self.dtype, "shape": list(self.shape), "per": self.per, "kept": self.kept}
        return said if self.values is None else said | {"values": list(self.values)}

    @classmethod
    def of_json(cls, said: dict) -> "Field":
        values = said.get("values")
        values = None if values is None else tuple(values)
        return cls(np.dtype(said["dtype"]).name, tuple(said["shape"]), said["per"], said["kept"], values)


def token_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= LARGEST_IN_TWO_BYTES else "uint32"


def annotated(fields: dict[str, Field]) -> dict[str, Field]:
    """The fields that annotations fill."""
    return {name: field for name, field in fields.items() if name not in PLANNED}


def check_name(name: str) -> str:
    """The name of a field, which becomes a file's. UserError for one that cannot."""
    if not NAME.fullmatch(name) or name in TAKEN:
        raise UserError(f"field {name!r}: use a name of small letters, digits and _ that is none of {', '.join(TAKEN)}")
    return name


def check_values(name: str, field: Field, number: int) -> None:
    """UserError where a part has more different texts of a field than its numbers can tell apart."""
    most = int(np.iinfo(field.dtype).max) + 1
    if number > most:
        cure = "leave it out (conll: --label-column 0)"
        raise UserError(f"field {name!r} has more than {most:,} different values in a part; {cure}")
