"""Texts as rows of tokens: as the tokenizer writes one or two, or for a model that reads from left to right."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Encoding

from data_pipelines.errors import UserError
from data_pipelines.examples.next_tokens import delimiter_token
from data_pipelines.tokenizers.made import Made, surround, with_end
from finetune.files import Told, tell

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """place: of the token at which the row is read as a whole."""

    tokens: Sequence[int]
    types: Sequence[int]
    place: int


def encoded(
    made: Made, texts: Sequence[tuple[str, ...]], wheres: Sequence[str], length: int, causal: bool
) -> list[Row]:
    """A row of at most so many tokens for each text or pair of texts; of what does not fit the longer text is cut.

    Special tokens are the tokenizer's. A row is read at its `cls` token, or for a causal model at the last one, the
    delimiter that `ending` puts there (Radford et al. 2018, section 3.3).

    wheres: of each, to say which is cut.
    """
    told, cls = Told(list), None if causal else made.special.get("cls")
    found = encodings(made, texts, wheres, length, told)
    tell(told)
    return [_row(one, cls) for one in found]


def in_windows(
    made: Made, texts: Sequence[tuple[str]], wheres: Sequence[str], length: int, causal: bool, stride: int
) -> list[list[Row]]:
    """The same of texts of which all is read: rows of each one that begin `stride` tokens after each other, by default
    half of those that a row has room for, until the last token is in one. UserError where rows skip some."""
    room = length - made.tokenizer.num_special_tokens_to_add(is_pair=False)
    if room < 2 or stride > room:
        raise UserError(
            f"--length {length}: has room for {room} tokens of a text, and --stride is {stride}; give more or less"
        )
    told, cls = Told(list), None if causal else made.special.get("cls")
    found = encodings(made, texts, wheres, length, told, room - (stride or room // 2))
    tell(told)
    return [[_row(window, cls) for window in (one, *one.overflowing)] for one in found]


def _row(one: Encoding, cls: int | None) -> Row:
    ids = one.ids
    return Row(ids, one.type_ids, ids.index(cls) if cls in ids else len(ids) - 1)


def encodings(
    made: Made,
    texts: Sequence[tuple[str, ...]],
    wheres: Sequence[str],
    length: int,
    told: Told,
    overlap: int | None = None,
) -> list[Encoding]:
    """The same as the tokenizer has them, with what does not fit as their `overflowing`.

    told: is told which are cut.   overlap: tokens that an encoding and the next of its text share, where all is read.
    """
    tokenizer = made.tokenizer
    tokenizer.enable_truncation(length, stride=overlap or 0, strategy="longest_first")
    try:
        found = tokenizer.encode_batch([one if len(one) > 1 else one[0] for one in texts])
    finally:
        tokenizer.no_truncation()
    if longer := [where for one, where in zip(found, wheres, strict=True) if one.overflowing]:
        how = "cut" if overlap is None else "read in windows"
        told[f"texts with more than --length {length} tokens, which are {how}"] += longer
    return found


def fitting(length: int, config: Any) -> int:
    """The length of rows, or the positions of a model where they are fewer, which is said."""
    if (positions := getattr(config, "positions", length)) < length:
        log.warning("--length %s: this model has %s positions, so no row is longer", length, positions)
    return min(length, positions)


def ending(made: Made) -> Made:
    """The tokenizer with the delimiter after each text, with <|endoftext|> as a further token where it has none.

    That is in the files which are exported, so that there texts are rows as here.
    """
    made = made if {"sep", "eod"} & made.special.keys() else with_end(made)
    end = made.tokenizer.id_to_token(delimiter_token(made.special))
    surround(made.tokenizer, f"$A {end}", f"$A {end} $B {end}")
    return made
