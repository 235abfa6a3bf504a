"""Texts as rows of tokens: as the tokenizer writes one or two, or for a model that reads from left to right."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_pipelines.examples.next_tokens import delimiter_token
from data_pipelines.tokenizers.made import Made


class Row(NamedTuple):
    """place: of the token at which the row is read as a whole."""

    tokens: Sequence[int]
    types: Sequence[int]
    place: int


def encoded(made: Made, texts: Sequence[tuple[str, ...]], length: int, causal: bool) -> list[Row]:
    """A row of at most so many tokens for each text or pair of texts; of what does not fit the longer text is cut.

    causal: then each text ends with the delimiter, and the last one is where a row is read (Radford et al. 2018,
    section 3.3); else special tokens are the tokenizer's, and the row is read at its `cls` token.
    """
    if causal:
        return _causal(made, texts, length)
    tokenizer, cls = made.tokenizer, made.special.get("cls")
    tokenizer.enable_truncation(length, strategy="longest_first")
    try:
        found = tokenizer.encode_batch([one if len(one) > 1 else one[0] for one in texts])
    finally:
        tokenizer.no_truncation()
    rows = []
    for one in found:
        ids = one.ids
        rows.append(Row(ids, one.type_ids, ids.index(cls) if cls in ids else len(ids) - 1))
    return rows


def _causal(made: Made, texts: Sequence[tuple[str, ...]], length: int) -> list[Row]:
    end, rows = delimiter_token(made.special), []
    flat = made.tokenizer.encode_batch([text for one in texts for text in one], add_special_tokens=False)
    encodings = iter(flat)
    for one in texts:
        parts = [next(encodings).ids for _ in one]
        row = [token for part, size in zip(parts, fitting([*map(len, parts)], length - len(parts)), strict=True)
               for token in (*part[:size], end)]  # fmt: skip
        rows.append(Row(row, np.zeros(len(row), np.int32), len(row) - 1))
    return rows


def fitting(sizes: list[int], room: int) -> list[int]:
    """Sizes cut so that together they have room: the longest first, as far as the next one."""
    kept = sorted(range(len(sizes)), key=lambda index: sizes[index])
    found, left = [*sizes], room
    for number, index in enumerate(kept):
        found[index] = min(sizes[index], left // (len(kept) - number))
        left -= found[index]
    return found
