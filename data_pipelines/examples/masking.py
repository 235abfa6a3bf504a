"""Masking for masked language modelling (Devlin et al. 2019, section 3.1, task 1), a whole batch at once.

In every row exactly k = max(1, round(rate * maskable tokens)) tokens are chosen: single tokens, units (whole words, or
spans that begin where another field of the corpus says) or n-grams of units. Of the chosen tokens a share becomes
[MASK], a share becomes a random token, and the rest stays: each token by itself, or a unit or a span as a whole
(`Masking.fate`). ELECTRA's generator uses mask 0.85 and random 0 (Clark et al. 2020, appendix A). MacBERT has similar
words in place of [MASK] (`Masking.similar`).

For n-grams (ALBERT, Lan et al. 2019, section 4.1) a row's words are cut into runs, each of n words with n drawn by
`Masking.ngrams`; runs end early at special tokens. Then runs are chosen as words are: in random order, each if it fits
in what is left of k. So all words are equally likely, and n has the requested distribution, except for the last few
tokens of k, which only short runs fit. If none fits, fewer than k are chosen.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature, RowLayout
from data_pipelines.similar_words import TABLES, SimilarWords

# Streams of a row's draws: changing a number changes the rows. `SEGMENTS` is for pairs
TOKENS, FATE, SEGMENTS, SIZES, PICKS = range(5)
TOKEN = "token"  # the unit for which each token is a unit
FATES = TOKEN, "unit", "span"
SHORT = 512  # longest rows whose order fits 32 bits: 23 of a hash, 9 of the position


@dataclass(frozen=True)
class Masking:
    """Which tokens are predicted. Raises UserError for invalid shares or weights."""

    rate: float = 0.15  # share of the tokens to predict
    mask: float = 0.8  # share of the predicted tokens that become [MASK]
    random: float = 0.1  # share of the predicted tokens that become a random token
    unit: str = TOKEN
    """What is chosen as a whole: `token`, or a field of the corpus that marks where units begin, such as `word_starts`;
    then fewer tokens may be chosen, if no remaining unit is small enough."""
    ngrams: tuple[float, ...] = ()  # weights of n = 1, 2, ..: choose n consecutive units at a time; none: one unit
    fate: str = TOKEN
    """What becomes [MASK], random or stays as a whole: a `token`, a `unit`, or a `span`, neighbours that are all
    predicted (Joshi et al. 2020, section 3.1)."""
    similar: bool = False
    """Let a unit become a similar word of the corpus's list, not [MASK], or random tokens if it has none (Cui et al.
    2020, section 3.2)."""
    copies: int = 0  # static masking: fixed copies of each row that epochs use in turn; 0: new in each epoch

    def __post_init__(self):
        if not 0 < self.rate <= 1:
            raise UserError(f"objective.masking.rate={self.rate}: must be above 0 and at most 1 (BERT: 0.15)")
        if not (0 <= self.mask <= 1 and 0 <= self.random <= 1 and self.mask + self.random <= 1):
            raise UserError(f"objective.masking.mask={self.mask}, random={self.random}: must be shares of at most 1")
        if self.ngrams and not (min(self.ngrams) >= 0 and 0 < sum(self.ngrams) < inf):
            raise UserError(f"objective.masking.ngrams={self.ngrams}: must be at least 0, not all 0 (ALBERT: 1 .5 .33)")
        if self.fate not in FATES:
            raise UserError(f"objective.masking.fate={self.fate!r}: use one of {', '.join(FATES)}")
        if self.similar and self.fate != "unit":
            raise UserError(f"objective.masking.similar=True with fate={self.fate!r}: needs units; use fate='unit'")
        if not 0 <= self.copies < 2**31:
            raise UserError(f"objective.masking.copies={self.copies}: must be from 0 to 2**31 - 1 (BERT: 10)")


class SpecialTokens(NamedTuple):
    """Ids that layouts and masking put in, those to draw random tokens from (int32 [m]), and similar words, if any."""

    pad: int
    cls: int
    sep: int
    mask: int
    ordinary: np.ndarray
    similar: SimilarWords | None = None

    @classmethod
    def of(cls, corpus: Corpus) -> "SpecialTokens":
        """Return a corpus's ids. Raises UserError if its tokenizer lacks one."""
        ids = corpus.require("pad", "cls", "sep", "mask")
        similar = SimilarWords(*map(corpus.table, TABLES)) if has_similar_words(corpus) else None
        return cls(*ids, ordinary_tokens(corpus), similar)


def has_similar_words(corpus: Corpus) -> bool:
    """Return whether a corpus was prepared with similar words."""
    return f"tables/{TABLES[0]}.npy" in corpus.manifest["tables"]


def ordinary_tokens(corpus: Corpus) -> np.ndarray:
    """Return the tokens of a corpus's vocabulary that are not special: int32."""
    return np.setdiff1d(np.arange(corpus.vocab_size, dtype=np.int32), list(corpus.special.values()))


def predictions(length: int, rate: float) -> int:
    """Return the prediction slots per row: the most tokens that can be chosen in a row of this length."""
    return ceil(rate * length)


@dataclass(frozen=True)
class MaskedRows(RowLayout):
    """Base of masked layouts. A batch holds tokens, types, segments, the prediction arrays of `mask` and, with
    global_tokens, `globals`: the positions of so many tokens, which a sparse pattern lets see all and be seen by all.
    Raises UserError for more global tokens than the row has tokens."""

    masks: Masking = Masking()  # BERT's
    _: KW_ONLY
    global_tokens: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.global_tokens <= self.length:
            raise UserError(f"globals={self.global_tokens}: must be from 0 (none) to the row's length={self.length}")

    @property
    def spec(self) -> dict[str, Feature]:
        slots = predictions(self.length, self.masks.rate)
        whole = dict.fromkeys(("tokens", "types", "segments"), Feature((self.length,)))
        predicted = dict.fromkeys(("prediction_positions", "prediction_targets"), Feature((slots,)))
        of_globals = {"globals": Feature((self.global_tokens,))} if self.global_tokens else {}
        return whole | predicted | {"prediction_weights": Feature((slots,), np.float32)} | of_globals

    @property
    def copies(self):
        return self.masks.copies

    def check(self, corpus):
        SpecialTokens.of(corpus)
        fields = {name: field for name, field in corpus.fields.items() if field.per == "token" and not field.shape}
        units = [TOKEN, *(name for name, field in fields.items() if field.dtype == "bool")]
        if self.masks.unit not in units:
            raise UserError(
                f"masking by unit={self.masks.unit!r}: corpus {corpus.path} has no field by token that marks where "
                f"such units begin; use one of {', '.join(units)}, or prepare it with --units"
            )
        if self.masks.similar and not has_similar_words(corpus):
            lacking = f"corpus {corpus.path} has no similar words; prepare it with --similar-words"
            raise UserError(f"objective.masking.similar=True: {lacking}")

    def masked(
        self,
        tokens: np.ndarray,
        special: SpecialTokens,
        keys: np.ndarray,
        maskable: np.ndarray,
        available: np.ndarray,
        starts: Callable[[str], np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Mask rows of tokens (int32 [n, length]) in place. Returns the arrays of a batch other than tokens, types and
        segments. starts: name of the field that marks where units begin -> its values, True at special tokens too, bool
        [n, length]. For the other parameters see `mask`."""
        begins = None if self.masks.unit == TOKEN else starts(self.masks.unit)
        made = mask(self.masks, special, keys, tokens, maskable, available, begins)
        if self.global_tokens:
            made["globals"] = global_positions(tokens, special.sep, self.global_tokens)
        return made


def mask(
    masking: Masking,
    special: SpecialTokens,
    keys: np.ndarray,
    tokens: np.ndarray,
    maskable: np.ndarray,
    available: np.ndarray,
    starts: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Choose tokens and corrupt them in place.

    keys: uint64 [batch]. tokens: int32 [batch, length], changed in place. maskable: bool [batch, length], False at
    special tokens and padding. available: int64 [batch], the number of maskable tokens of each row. starts: where units
    begin, bool [batch, length], True at special tokens too; None if each token is a unit.

    Returns prediction_positions (int32 [batch, slots], ascending, 0 where unused), prediction_targets (int32, the
    original token, 0 where unused) and prediction_weights (float32, 1 where used, else 0).
    """
    batch, length = tokens.shape
    slots = predictions(length, masking.rate)
    wanted = np.maximum(np.rint(masking.rate * available).astype(np.int64), 1)
    wanted = np.minimum(np.minimum(wanted, available), slots)
    units = starts
    if masking.ngrams:
        starts = _run_starts(masking.ngrams, keys, maskable, True if starts is None else starts)
    if starts is None:
        positions = np.sort(choose(keys, TOKENS, maskable, wanted, slots), axis=1)
    else:
        positions = _choose_units(keys, maskable, starts, wanted, slots)
    used = positions < length
    positions *= used
    flat = positions + np.arange(0, batch * length, length)[:, None]  # into tokens.ravel()
    targets = tokens.ravel()[flat] * used
    begins = None
    if masking.fate != TOKEN:
        begins = np.ones(positions.shape, bool)
        np.not_equal(positions[:, 1:], positions[:, :-1] + 1, out=begins[:, 1:])
        if masking.fate == "unit":
            begins |= True if units is None else units.ravel()[flat]
    tokens.ravel()[flat[used]] = _corrupted(masking, special, keys, targets, begins)[used]
    return {
        "prediction_positions": positions.astype(np.int32),
        "prediction_targets": targets,
        "prediction_weights": used.astype(np.float32),
    }


def _corrupted(masking, special, keys, targets, begins):
    """Return what the chosen tokens become: int32 [batch, slots]. begins: bool, slots with their own fate; None:
    all."""
    slots = targets.shape[1]
    fate = noise.bits(keys, noise.counters(FATE, slots))
    if begins is not None:
        first = np.flatnonzero(begins)
        fate = np.repeat(fate.ravel()[first], np.diff(first, append=fate.size)).reshape(fate.shape)
        picks = noise.bits(keys, noise.counters(PICKS, slots))
    masked, random = round(masking.mask * 2**32), round((masking.mask + masking.random) * 2**32)
    corrupted = targets.copy()
    is_random = (fate >= masked) & (fate < random)
    if masking.similar:
        where = np.flatnonzero(fate < masked)
        starts = np.flatnonzero(begins.ravel()[where])
        draws = picks.ravel()[where[starts]]
        corrupted.ravel()[where], found = special.similar.of(targets.ravel()[where], starts, draws)
        is_random.ravel()[where] = ~found
    else:
        np.copyto(corrupted, special.mask, where=fate < masked)
    drawn = np.flatnonzero(is_random)
    if begins is None:  # between the two limits the draw is uniform, so it also picks the token
        choice = (fate.ravel()[drawn] - np.int64(masked)) * len(special.ordinary) // (random - masked)
    else:
        choice = noise.below(picks.ravel()[drawn], len(special.ordinary))
    corrupted.ravel()[drawn] = special.ordinary[choice]
    return corrupted


def _run_starts(ngrams, keys, maskable, unit_starts):
    """Return where runs of units begin, which are then chosen as units are: bool [batch, length]. The k-th run of a row
    has n units, n by the k-th draw. If a special token comes before, it has fewer, and the next run has the rest."""
    starts = np.ones(maskable.shape, bool)
    np.logical_not(maskable[:, :-1], out=starts[:, 1:])  # after special tokens
    units = np.flatnonzero(maskable & (unit_starts | starts))
    ends = np.searchsorted(units, np.arange(len(keys) + 1) * maskable.shape[1])  # of rows
    before, count = ends[:-1], np.diff(ends).astype(np.int32)
    # The numbers, in the row, of the units that begin runs; a row's first unit follows a special token
    number = _run_ends(ngrams, keys, count)
    begins = (number + before[:, None])[number < count[:, None]]
    starts.ravel()[units.take(begins)] = True
    return starts


def _run_ends(ngrams, keys, count):
    """Return the units up to the end of each run, ascending in each row, up to its `count` (int32 [batch]) at least."""
    most, mean = count.max(initial=0), np.arange(1, len(ngrams) + 1) @ ngrams / sum(ngrams)
    for runs in (min(most, int(1.15 * most / mean) + 16), most):  # the first are nearly always enough
        draws = noise.bits(keys, noise.counters(SIZES, runs))
        sizes = np.ones(draws.shape, np.uint16)
        for share in np.cumsum(ngrams)[:-1] / sum(ngrams):
            sizes += draws >= round(share * 2**32)
        number = np.cumsum(sizes.astype(np.int32), axis=1, dtype=np.int32)
        if np.all(number[:, -1:] >= count[:, None]):
            break
    return number


def choose(keys: np.ndarray, stream: int, maskable: np.ndarray, wanted: np.ndarray, slots: int) -> np.ndarray:
    """Choose `wanted` (int64 [batch]) of the maskable tokens (bool [batch, length]) per row, every set with the same
    probability. Returns positions, uint32 [batch, slots], in random order, then `length` in unused slots."""
    length = maskable.shape[1]
    positions = _shuffled(keys, noise.counters(stream, length), maskable, length)[:, :slots]
    positions = (positions & _numbers(length)).astype(np.uint32)
    np.copyto(positions, np.uint32(length), where=np.arange(slots) >= wanted[:, None])
    return positions


def _choose_units(keys, maskable, starts, wanted, slots):
    """Like `choose`, but ascending, and take units in random order, each if it fits in what is left of `wanted`."""
    batch, length = maskable.shape
    last = length - np.argmax(maskable[:, ::-1], axis=1)  # after which there is no text
    real, special = np.arange(length, dtype=np.int32) < last.astype(np.int32)[:, None], ~maskable.ravel()
    begin = np.flatnonzero(starts & real)
    ends = np.searchsorted(begin, np.arange(batch + 1) * length)
    before, count = ends[:-1], np.diff(ends).astype(np.int32)  # units before each row, and in it
    end = np.append(begin[1:], 0)
    end[ends[1:] - 1] = np.arange(0, batch * length, length) + last
    end -= special.take(end - 1)  # which ends a run
    begin += special.take(begin)  # which begins the rest of a word that it cuts in two
    size = np.maximum(end - begin, 0).astype(np.int32)
    number = np.arange(count.max(initial=0), dtype=np.int32)
    order = _shuffled(keys, noise.counters(TOKENS, len(number) + 1)[1:], number < count[:, None], length)
    rows, left, taken = np.arange(batch), wanted.astype(np.int32), []
    for columns in (slots, len(number)):  # the first are nearly always enough
        some = order[rows, :columns]
        unit = (some & _numbers(length)).astype(np.int64) + before[rows, None]
        sizes = size.take(unit, mode="clip")
        sizes[some == np.iinfo(order.dtype).max] = 0
        fits, room = _fitting(sizes, left[rows])
        full = (room == 0) | (columns >= len(number))
        taken.append(unit[fits & full[:, None]])
        left[rows[full]] = room[full]
        rows = rows[~full]
    units = np.sort(np.concatenate(taken))
    begin, size = begin[units] % length, size[units]
    positions = np.full((batch, slots), length, np.uint32)
    places = np.repeat(begin - (np.cumsum(size) - size), size) + np.arange(size.sum())
    positions[np.arange(slots) < (wanted - left)[:, None]] = places
    return positions


def _fitting(sizes, room):
    """Take each unit that fits in what is left of the room.   sizes: int32 [rows, units], in their random order, 0
    where there is none; room: int32 [rows]. Returns bool [rows, units], which are taken, and the room that is left."""
    # The units up to the first one that does not fit, then one more at a time
    ends = np.cumsum(sizes, axis=1, dtype=np.int32)
    taken = ends <= room[:, None]
    at = np.count_nonzero(taken, axis=1).astype(np.int32)
    taken &= sizes > 0
    room = room - np.max(ends * taken, axis=1, initial=0)
    rows, column = np.flatnonzero(room), np.arange(sizes.shape[1], dtype=np.int32)
    while len(rows):
        of_rows = sizes[rows]
        fits = (of_rows > 0) & (of_rows <= room[rows, None]) & (column >= at[rows, None])
        first = np.argmax(fits, axis=1)
        found = fits[np.arange(len(rows)), first]
        rows, first = rows[found], first[found]
        taken[rows, first] = True
        at[rows] = first + 1
        room[rows] -= sizes[rows, first]
        rows = rows[room[rows] > 0]
    return taken, room


def _shuffled(keys, counters, maskable, length):
    """Sort the tokens or units of rows of `length` tokens by a hash of their counter: uint32 [batch, n], with their
    number in the row in the low bits, so that one sort of plain integers moves both. Those that must not be chosen are
    the highest integer. Rows longer than `SHORT` give uint64: in 32 bits the number would leave too few for the hash.

    Equal hashes come by number, which favours one only if the two straddle the last one chosen.
    """
    order = noise.bits(keys, counters)
    if length > SHORT:
        order = order.astype(np.uint64) * np.uint64(_numbers(length) + 1)
    else:
        order &= ~np.uint32(_numbers(length))
    order |= np.arange(order.shape[1], dtype=order.dtype)
    np.copyto(order, np.iinfo(order.dtype).max, where=~maskable)
    order.sort(axis=1)
    return order


def _numbers(length):
    """Return the low bits that hold a number below `length`."""
    return (1 << (length - 1).bit_length()) - 1


def global_positions(tokens: np.ndarray, sep: int, number: int) -> np.ndarray:
    """Return the position of each row's first token, then those of its separators, then -1: i32[rows, number]."""
    is_global = tokens == sep
    is_global[:, 0] = True
    row, position = np.nonzero(is_global)
    rank = (np.cumsum(is_global, axis=1) - 1)[row, position]  # 0, 1, .. within each row
    within = rank < number
    named = np.full((len(is_global), number), -1, np.int32)
    named[row[within], rank[within]] = position[within]
    return named
