"""Dynamic masking for masked language modelling (Devlin et al. 2019, section 3.1, task 1), a whole batch at
once.

In every row exactly k = max(1, round(rate * maskable tokens)) tokens are chosen, by token or by whole word;
of the chosen a fraction becomes [MASK], a fraction a random token, and the rest stays. ELECTRA's generator
uses mask 0.85 and random 0 (Clark et al. 2020, appendix A).
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError

# Streams of the examples' keys; each layout's own draws come from LAYOUT
ORDER, FATE, REPLACEMENT, LAYOUT = range(4)
LAST = np.uint32(0xFFFFFFFF)  # sorts after every token that may be chosen


@dataclass(frozen=True)
class Masking:
    """rate: share of the tokens that is predicted. mask, random: shares of those that become [MASK] and a
    random token.

    whole_word: choose words, not tokens; then fewer than k may be chosen where no word left is small enough.
    Raises UserError for shares that are none.
    """

    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_word: bool = False

    def __post_init__(self):
        if not 0 < self.rate <= 1:
            raise UserError(f"masking rate {self.rate} must be above 0 and at most 1 (BERT: 0.15)")
        if self.mask < 0 or self.random < 0 or self.mask + self.random > 1:
            raise UserError(
                f"masking fractions mask {self.mask} and random {self.random} must be at least 0 "
                "and add up to at most 1 (BERT: 0.8 and 0.1)"
            )


BERT = Masking()


class SpecialTokens(NamedTuple):
    """Ids that the layouts and the masking put in, and the ids to draw random tokens from (int32 [m])."""

    pad: int
    cls: int
    sep: int
    mask: int
    ordinary: np.ndarray

    @classmethod
    def of(cls, corpus):
        """Raises UserError where the corpus's tokenizer lacks one."""
        roles = ("pad", "cls", "sep", "mask")
        missing = [role for role in roles if role not in corpus.special]
        if missing:
            raise UserError(
                f"corpus {corpus.path} has no {' and no '.join(missing)} token, which masking needs; "
                "prepare it with a tokenizer that has one"
            )
        ordinary = np.setdiff1d(np.arange(corpus.vocab_size, dtype=np.int32), list(corpus.special.values()))
        return cls(*(corpus.special[role] for role in roles), ordinary)


def predictions(length, rate):
    """Prediction slots per row: the most tokens that a row of this length can have chosen."""
    return ceil(rate * length)


def spec(length, masking):
    """Shapes (without the batch) and dtypes of the arrays that every masked layout has: name -> (shape,
    dtype)."""
    slots = predictions(length, masking.rate)
    return {
        "tokens": ((length,), np.int32),
        "types": ((length,), np.int32),
        "segments": ((length,), np.int32),
        "prediction_positions": ((slots,), np.int32),
        "prediction_targets": ((slots,), np.int32),
        "prediction_weights": ((slots,), np.float32),
    }


def mask(masking, keys, tokens, maskable, word_starts, special):
    """Choose tokens and corrupt them in place.

    masking: Masking. keys: uint64 [batch]. tokens: int32 [batch, length], changed in place. maskable: bool
    [batch, length], False at special tokens and padding. word_starts: bool [batch, length], or None unless
    whole words are masked; it must be True at special tokens. special: SpecialTokens.

    Returns prediction_positions (int32 [batch, slots], ascending, 0 where unused), prediction_targets (int32,
    the token that stood there, 0 where unused) and prediction_weights (float32, 1 where used).
    """
    batch, length = tokens.shape
    slots = predictions(length, masking.rate)
    available = np.count_nonzero(maskable, axis=1)
    wanted = np.maximum(np.rint(masking.rate * available).astype(np.int64), 1)
    wanted = np.minimum(np.minimum(wanted, available), slots)
    if masking.whole_word:
        positions = _choose_words(keys, maskable, word_starts, wanted, slots)
    else:
        positions = _choose_tokens(keys, maskable, wanted, slots)
    used = positions < length
    positions *= used
    flat = positions + (np.arange(batch, dtype=np.uint32) * np.uint32(length))[:, None]  # into tokens.ravel()
    targets = tokens.ravel()[flat] * used
    fate = noise.bits(keys[:, None], noise.counters(FATE, slots))
    draw = noise.bits(keys[:, None], noise.counters(REPLACEMENT, slots))
    random = special.ordinary[noise.below(draw, len(special.ordinary))]
    corrupted = np.where(fate < _threshold(masking.mask + masking.random), random, targets)
    corrupted = np.where(fate < _threshold(masking.mask), np.int32(special.mask), corrupted)
    tokens.ravel()[flat[used]] = corrupted[used]
    return {
        "prediction_positions": positions.astype(np.int32),
        "prediction_targets": targets,
        "prediction_weights": used.astype(np.float32),
    }


def _choose_tokens(keys, maskable, wanted, slots):
    """The positions of `wanted` tokens per row, uniform among all sets of that size: uint32 [batch, slots],
    ascending, `length` in the slots left over."""
    length = maskable.shape[1]
    order = _shuffled(keys, np.arange(length, dtype=np.uint32), maskable)[:, :slots]
    chosen = np.arange(slots) < wanted[:, None]
    return _ascending(order, chosen, length)


def _choose_words(keys, maskable, word_starts, wanted, slots):
    """Like _choose_tokens, but words in random order, each included while it fits in what `wanted` leaves."""
    length = maskable.shape[1]
    words = np.cumsum(word_starts, axis=1, dtype=np.uint32)
    order = _shuffled(keys, words, maskable)
    # Two words of one row whose hashes agree (about 1 row in 100) count as one word; no word is ever split
    word = order >> _position_bits(length)
    starts = np.ones(order.shape, bool)
    np.not_equal(word[:, 1:], word[:, :-1], out=starts[:, 1:])
    column = np.arange(length)
    head = column[: slots + 1]
    # Tokens in the first words up to one that does not fit: `wanted` itself where a word ends there
    full = np.max(head * (starts[:, : slots + 1] & (head <= wanted[:, None])), axis=1)
    chosen = column < full[:, None]
    unfilled = np.flatnonzero(full < wanted)
    if len(unfilled):
        room = (wanted - full)[unfilled]
        chosen[unfilled] |= _fill(order[unfilled], starts[unfilled], full[unfilled], room)
    return _ascending(order, chosen, length)[:, :slots]


def _fill(order, starts, at, room):
    """Go on after the word at column `at`, which did not fit: take each later word that still does.

    order: uint32 [rows, length], tokens in their words' random order; starts: bool, True where a word begins;
    at, room: int64 [rows]. Returns bool [rows, length], True at the tokens taken.
    """
    rows, length = order.shape
    begins = np.flatnonzero(starts)  # column 0 always begins a word, so no word runs into the next row
    sizes = np.full(rows * length, length + 1)
    sizes[begins] = np.diff(begins, append=rows * length)
    sizes = sizes.reshape(rows, length)
    sizes[order == LAST] = length + 1
    column = np.arange(length)
    taken = np.zeros(order.shape, bool)
    left = np.arange(rows)
    while len(left):
        fits = (sizes[left] <= room[left, None]) & (column > at[left, None])
        found = np.argmax(fits, axis=1)
        found, left = found[fits.any(axis=1)], left[fits.any(axis=1)]
        size = sizes[left, found]
        taken[left] |= (column >= found[:, None]) & (column < (found + size)[:, None])
        at[left] = found
        room[left] -= size
        left = left[room[left] > 0]
    return taken


def _shuffled(keys, counters, maskable):
    """Sort each row's tokens by a hash of their counter: uint32 [batch, length], the position in the low
    bits, so that one sort of plain integers moves both; what may not be chosen comes last, as LAST.

    Tokens of equal hash come by position. That favours a token only where such a pair straddles the last one
    chosen.
    """
    length = maskable.shape[1]
    order = noise.bits(keys[:, None], counters)
    order >>= _position_bits(length)
    order <<= _position_bits(length)
    order |= np.arange(length, dtype=np.uint32)
    np.putmask(order, ~maskable, LAST)
    order.sort(axis=1)
    return order


def _ascending(order, chosen, length):
    """Positions of the chosen entries of `order`, ascending, then `length`: uint32, of order's shape."""
    positions = order & np.uint32((1 << _position_bits(length)) - 1)
    np.putmask(positions, ~chosen, length)
    positions.sort(axis=1)
    return positions


def _position_bits(length):
    return np.uint32((length - 1).bit_length())


def _threshold(share):
    """uint32 bits below this are a share's part of all values."""
    return min(round(share * 2**32), 0xFFFFFFFF)
