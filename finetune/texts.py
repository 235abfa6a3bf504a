"""Encodes texts and pairs of texts as rows of tokens, also for models that read from left to right."""

import logging
from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding

from data_pipelines.errors import UserError
from data_pipelines.examples.next_tokens import delimiter_token
from data_pipelines.tokenizers.made import Made, surround, with_end
from finetune.files import Told, tell
from finetune.rows import Row

log = logging.getLogger(__name__)


def encoded(made: Made, texts: Sequence[tuple], wheres: Sequence[str], length: int, at_end: bool) -> list[Row]:
    """Encode each text or pair of texts as a row of at most `length` tokens; the longer text of a pair is cut first.

    The tokenizer adds the special tokens. A head reads the row's `cls` token or, with at_end, the last token: for a
    causal model the delimiter that `ending` appends (Radford et al. 2018, section 3.3).

    wheres: file and line of each text, for the warning about cut texts.
    """
    told, cls = Told(list), None if at_end else made.special.get("cls")
    found = encodings(made, texts, wheres, length, told)
    tell(told)
    return [_row(one, cls) for one in found]


def in_windows(
    made: Made, texts: Sequence[tuple[str]], wheres: Sequence[str], length: int, at_end: bool, stride: int
) -> list[list[Row]]:
    """Encode each text as overlapping rows that cover all of it. Rows start `stride` tokens apart, by default half of
    the tokens of a text that fit a row. UserError if rows would skip tokens."""
    room = length - made.tokenizer.num_special_tokens_to_add(is_pair=False)
    if room < 2 or stride > room:
        wrong = f"fits {room} tokens of a text, but --stride is {stride}; raise it or lower --stride"
        raise UserError(f"--length {length}: {wrong}")
    told, cls = Told(list), None if at_end else made.special.get("cls")
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
    """Return the tokenizer's encodings of at most `length` tokens, with the rest of long texts as `overflowing`.

    told: receives a warning for each cut text.   overlap: tokens that consecutive windows of a text share; None to cut.
    """
    tokenizer = made.tokenizer
    tokenizer.enable_truncation(length, stride=overlap or 0, strategy="longest_first")
    try:
        found = tokenizer.encode_batch([one if len(one) > 1 else one[0] for one in texts])
    finally:
        tokenizer.no_truncation()
    if longer := [where for one, where in zip(found, wheres, strict=True) if one.overflowing]:
        how = "cut" if overlap is None else "split into windows"
        told[f"texts longer than --length {length} tokens, which are {how}"] += longer
    return found


def fitting(length: int, config: Any) -> int:
    """Return the length of rows, limited with a warning to the positions of the model."""
    if (positions := getattr(config, "positions", length)) < length:
        log.warning("--length %s: the model has only %s positions, so rows are limited to that", length, positions)
    return min(length, positions)


def ending(made: Made) -> Made:
    """Return the tokenizer set to append the delimiter to each text; adds the token <|endoftext|> if it has none.
    Exported tokenizer files keep this, so that they encode texts as in finetuning."""
    made = made if {"sep", "eod"} & made.special.keys() else with_end(made)
    end = made.tokenizer.id_to_token(delimiter_token(made.special))
    surround(made.tokenizer, f"$A {end}", f"$A {end} $B {end}")
    return made
