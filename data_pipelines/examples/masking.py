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
            raise UserError(
                f"objective.masking.mask={self.mask} and random={self.random}: must be at least 0 "
                "and add up to at most 1 (BERT: 0.8 and 0.1)"
            )
        if self.ngrams and not (min(self.ngrams) >= 0 and 0 < sum(self.ngrams) < inf):
            raise UserError(
                f"objective.masking.ngrams={self.ngrams}: must be weights of at least 0 with a sum above 0 "
                "(ALBERT: 1 0.5 0.3333)"
            )
        if self.fate not in FATES:
            raise UserError(f"objective.masking.fate={self.fate!r}: use one of {', '.join(FATES)}")
        if self.similar and self.fate != "unit":
            raise UserError(
                f"objective.masking.similar=True with fate={self.fate!r}: units become similar words; use fate='unit'"
            )
        if not 0 <= self.copies < 2**31:
            raise UserError(
                f"objective.masking.copies={self.copies}: must be at least 0 (always new) and below 2**31 (BERT: 10)"
            )


class SpecialTokens(NamedTuple):
    """Ids that the layouts and the masking put in, the ids to draw random tokens from (int32 [m]), and the similar
    words of a corpus that has any."""

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
    return f"tables/{TABLES[0]}.npy" in corpus.manifest.get("tables", {})


def ordinary_tokens(corpus: Corpus) -> np.ndarray:
    """Return the tokens of a corpus's vocabulary that are not special: int32."""
    return np.setdiff1d(np.arange(corpus.vocab_size, dtype=np.int32), list(corpus.special.values()))


def predictions(length: int, rate: float) -> int:
    """Return the prediction slots per row: the most tokens that can be chosen in a row of this length."""
    return ceil(rate * length)


@dataclass(frozen=True)
class MaskedRows(RowLayout):
    """Base of masked layouts. A batch holds tokens, types, segments, the prediction arrays of `mask` and, with
    global_tokens, `globals`: the positions of so many tokens, which in a sparse pattern see all tokens and are seen by
    all.

    Raises UserError for more global tokens than the row has tokens.
    """

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
            raise UserError(
                f"objective.masking.similar=True: corpus {corpus.path} has no similar words; prepare it with "
                "--similar-words FILE"
            )

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
    """Return what the chosen tokens become: int32 [batch, slots]. begins: bool, the slots that share no fate with the
    one before; None if none does."""
    slots = targets.shape[1]
    fate = noise.bits(keys, noise.counters(FATE, slots))
    if begins is not None:
        first = np.maximum.accumulate(np.where(begins, np.arange(slots), 0), axis=1)
        fate = np.take_along_axis(fate, first, axis=1)
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
    units = maskable & (unit_starts | starts)
    count = np.count_nonzero(units, axis=1)
    # The numbers, in the row, of the units that begin runs; a row's first unit follows a special token
    number = _run_ends(ngrams, keys, count)
    before = np.cumsum(count) - count  # units in earlier rows
    begins = (number + before[:, None])[number < count[:, None]]
    starts.ravel()[np.flatnonzero(units)[begins]] = True
    return starts


def _run_ends(ngrams, keys, count):
    """Return the units up to the end of each run, ascending in each row, up to its `count` (int64 [batch]) at least."""
    most, mean = count.max(initial=0), np.arange(1, len(ngrams) + 1) @ ngrams / sum(ngrams)
    for runs in (min(most, int(1.3 * most / mean) + 8), most):  # the first are nearly always enough
        draws = noise.bits(keys, noise.counters(SIZES, runs))
        sizes = np.ones(draws.shape, np.int32)
        for share in np.cumsum(ngrams)[:-1] / sum(ngrams):
            sizes += draws >= round(share * 2**32)
        number = np.cumsum(sizes, axis=1, out=sizes)
        if np.all(number[:, -1:] >= count[:, None]):
            break
    return number


def choose(keys: np.ndarray, stream: int, maskable: np.ndarray, wanted: np.ndarray, slots: int) -> np.ndarray:
    """Choose `wanted` (int64 [batch]) of the maskable tokens (bool [batch, length]) per row, every set of that size
    with the same probability. Returns positions, uint32 [batch, slots], in random order, then `length` in unused slots.
    stream: of the draws."""
    length = maskable.shape[1]
    order = _shuffled(keys, noise.counters(stream, length), maskable)[:, :slots]
    return _positions(order, np.arange(slots) < wanted[:, None], length)


def _choose_units(keys, maskable, starts, wanted, slots):
    """Like `choose`, but ascending, and take units in random order, each if it fits in what is left of `wanted`."""
    length = maskable.shape[1]
    order = _shuffled(keys, np.cumsum(starts, axis=1, dtype=np.uint32), maskable)
    # Two units with the same hash (in 1 row in 100 of 512 tokens, 1 in 3 of 65,536) count as one; none is split
    unit = order >> order.dtype.type(_position_bits(length))
    starts = np.ones(order.shape, bool)
    np.not_equal(unit[:, 1:], unit[:, :-1], out=starts[:, 1:])
    column = np.arange(length)
    # Tokens in the first units up to one that does not fit: `wanted` itself where a unit ends there
    head = column[: slots + 1]
    full = np.max(head * (starts[:, : slots + 1] & (head <= wanted[:, None])), axis=1)
    chosen = column < full[:, None]
    unfilled = np.flatnonzero(full < wanted)
    if len(unfilled):
        room = (wanted - full)[unfilled]
        chosen[unfilled] |= _fill(order[unfilled], starts[unfilled], full[unfilled], room)
    return np.sort(_positions(order, chosen, length), axis=1)[:, :slots]


def _fill(order, starts, at, room):
    """Continue after the unit at column `at`, which did not fit: take each later unit that does.

    order: uint32 [rows, length], tokens in their units' random order; starts: bool, True where a unit begins; at, room:
    int64 [rows], changed. Returns bool [rows, length], True at the tokens taken.
    """
    row, column = np.nonzero(starts)  # column 0 always begins a unit, so none runs into the next row
    size = np.diff(row * order.shape[1] + column, append=order.size)
    size[order[row, column] == np.iinfo(order.dtype).max] = order.size
    edges = np.zeros((len(order), order.shape[1] + 1), np.int8)
    while len(row):
        fits = np.flatnonzero((size <= room[row]) & (column > at[row]))
        row, column, size = row[fits], column[fits], size[fits]
        first = np.flatnonzero(np.diff(row, prepend=-1))
        found, begin, tokens = row[first], column[first], size[first]
        edges[found, begin] += 1
        edges[found, begin + tokens] -= 1
        at[found] = begin
        room[found] -= tokens
    return np.cumsum(edges, axis=1, dtype=np.int8)[:, :-1].view(bool)


def _shuffled(keys, counters, maskable):
    """Sort each row's tokens by a hash of their counter: uint32 [batch, length], with the position in the low bits, so
    that one sort of plain integers moves both. Tokens that must not be chosen are the highest number. Rows longer than
    `SHORT` give uint64: in 32 bits the position would leave too few for the hash.

    Tokens of equal hash come by position, which favours one only if the two straddle the last token chosen.
    """
    length = maskable.shape[1]
    order = noise.bits(keys, counters)
    if length > SHORT:
        order = order.astype(np.uint64) << np.uint64(_position_bits(length))
    else:
        order &= ~_position_mask(length, order.dtype)
    order |= np.arange(length, dtype=order.dtype)
    np.copyto(order, np.iinfo(order.dtype).max, where=~maskable)
    order.sort(axis=1)
    return order


def _positions(order, chosen, length):
    """Return the positions of the chosen entries of `order`, `length` in place of others: uint32, of order's shape."""
    positions = (order & _position_mask(length, order.dtype)).astype(np.uint32, copy=False)
    np.copyto(positions, np.uint32(length), where=~chosen)
    return positions


def _position_bits(length):
    return (length - 1).bit_length()


def _position_mask(length, dtype):
    return dtype.type((1 << _position_bits(length)) - 1)


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
