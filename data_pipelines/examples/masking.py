"""Masking for masked language modelling (Devlin et al. 2019, section 3.1, task 1), a whole batch at
once.

In every row exactly k = max(1, round(rate * maskable tokens)) tokens are chosen, by token, by unit (whole words, or
what another field of the corpus says the beginnings of) or by n-grams of units; of the chosen a fraction becomes
[MASK], a fraction a random token, and the rest stays. ELECTRA's generator uses mask 0.85 and random 0 (Clark et al.
2020, appendix A).

For n-grams (ALBERT, Lan et al. 2019, section 4.1) a row's words are cut into runs, each of n words with n drawn by
`Masking.ngrams`, which end early at special tokens. Then runs are chosen as words are: in random order, each while it
fits in what is left of k. So every word is as likely as any other and n has the asked distribution, but for the last
few tokens of k, which only short runs fit. Where none fits fewer than k are chosen.
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

# Streams of a row's draws: other numbers make other rows. `SEGMENTS` is of pairs; a layout may have more, from 4 on
TOKENS, FATE, SEGMENTS, SIZES = range(4)
TOKEN = "token"  # the unit where each token is one
SHORT = 512  # tokens of rows whose order fits 32 bits: 23 of a hash, 9 of the position


@dataclass(frozen=True)
class Masking:
    """Which tokens are predicted. Raises UserError for shares or weights that are none."""

    rate: float = 0.15  # share of the tokens that is predicted
    mask: float = 0.8  # share of those that become [MASK]
    random: float = 0.1  # share of those that become a random token
    unit: str = TOKEN
    """What is chosen whole: `token`, or the field of the corpus that says where units begin, as `word_starts`; then
    fewer tokens may be chosen where no unit left is small enough."""
    ngrams: tuple[float, ...] = ()  # weights of n = 1, 2, ..: choose n consecutive units at a time; none: single ones
    copies: int = 0  # static: fixed noise of so many copies of each row, which epochs take in turn; 0: always anew

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
        if self.ngrams and self.unit == TOKEN:
            raise UserError(
                f"objective.masking.ngrams={self.ngrams} but objective.masking.unit={self.unit}: n-grams are of whole "
                "words; set it to word_starts"
            )
        if not 0 <= self.copies < 2**31:
            raise UserError(
                f"objective.masking.copies={self.copies}: must be at least 0 and below 2**31 (BERT: 10; 0: always anew)"
            )


class SpecialTokens(NamedTuple):
    """Ids that the layouts and the masking put in, and the ids to draw random tokens from (int32 [m])."""

    pad: int
    cls: int
    sep: int
    mask: int
    ordinary: np.ndarray

    @classmethod
    def of(cls, corpus: Corpus) -> "SpecialTokens":
        """Raises UserError where the corpus's tokenizer lacks one."""
        ids = corpus.require("pad", "cls", "sep", "mask")
        ordinary = np.setdiff1d(np.arange(corpus.vocab_size, dtype=np.int32), list(corpus.special.values()))
        return cls(*ids, ordinary)


def predictions(length: int, rate: float) -> int:
    """Prediction slots per row: the most tokens that a row of this length can have chosen."""
    return ceil(rate * length)


@dataclass(frozen=True)
class MaskedRows(RowLayout):
    """Base of such layouts. A batch holds tokens, types, segments, the prediction arrays of `mask` and, with
    global_tokens, `globals`: of so many, which a sparse pattern lets see all and be seen by all, the positions.

    Raises UserError for more global tokens than the row has tokens.
    """

    masks: Masking = Masking()  # BERT's
    _: KW_ONLY
    global_tokens: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.global_tokens <= self.length:
            raise UserError(
                f"globals={self.global_tokens}: must be from 0, for none, to the row's length={self.length}"
            )

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
                f"objective.masking.unit={self.masks.unit!r}: corpus {corpus.path} has no field by token that says "
                f"where such units begin; use one of {', '.join(units)}"
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
        """Mask rows of tokens (int32 [n, length]) in place -> the arrays of a batch beside tokens, types and segments.
        starts: the field that says where units begin -> its values, and True at special tokens, bool [n, length]. The
        others: see `mask`."""
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
    special tokens and padding. available: int64 [batch], the maskable tokens of each row. starts: where units
    begin, bool [batch, length], True at special tokens too; None where each token is one.

    Returns prediction_positions (int32 [batch, slots], ascending, 0 where unused), prediction_targets (int32, the
    token that stood there, 0 where unused) and prediction_weights (float32, 1 where used, else 0).
    """
    batch, length = tokens.shape
    slots = predictions(length, masking.rate)
    wanted = np.maximum(np.rint(masking.rate * available).astype(np.int64), 1)
    wanted = np.minimum(np.minimum(wanted, available), slots)
    if masking.ngrams:
        starts = _run_starts(masking.ngrams, keys, maskable, starts)
    if starts is None:
        positions = _choose_tokens(keys, maskable, wanted, slots)
    else:
        positions = _choose_units(keys, maskable, starts, wanted, slots)
    used = positions < length
    positions *= used
    flat = positions + np.arange(0, batch * length, length)[:, None]  # into tokens.ravel()
    targets = tokens.ravel()[flat] * used
    tokens.ravel()[flat[used]] = _corrupted(masking, special, keys, targets)[used]
    return {
        "prediction_positions": positions.astype(np.int32),
        "prediction_targets": targets,
        "prediction_weights": used.astype(np.float32),
    }


def _corrupted(masking, special, keys, targets):
    """What the chosen tokens become: int32 [batch, slots]."""
    fate = noise.bits(keys, noise.counters(FATE, targets.shape[1]))
    masked, random = round(masking.mask * 2**32), round((masking.mask + masking.random) * 2**32)
    corrupted = targets.copy()
    np.copyto(corrupted, special.mask, where=fate < masked)
    drawn = np.flatnonzero((fate >= masked) & (fate < random))
    # Between the two limits the draw is uniform, so it picks the token as well
    choice = (fate.ravel()[drawn] - np.int64(masked)) * len(special.ordinary) // (random - masked)
    corrupted.ravel()[drawn] = special.ordinary[choice]
    return corrupted


def _run_starts(ngrams, keys, maskable, unit_starts):
    """Where runs of units begin, to be chosen as if they were units: bool [batch, length]. A row's k-th has n units by
    the k-th draw, fewer where a special token comes before: then the next run has the rest."""
    starts = np.ones(maskable.shape, bool)
    np.logical_not(maskable[:, :-1], out=starts[:, 1:])  # after special tokens
    units = maskable & (unit_starts | starts)
    count = np.count_nonzero(units, axis=1)
    draws = noise.bits(keys, noise.counters(SIZES, count.max(initial=0)))
    sizes = np.ones(draws.shape, np.int32)
    for share in np.cumsum(ngrams)[:-1] / sum(ngrams):
        sizes += draws >= round(share * 2**32)
    # The numbers, in the row, of the units that begin runs; the first follows a special token
    number = np.cumsum(sizes, axis=1, out=sizes)
    before = np.cumsum(count) - count  # units in earlier rows
    begins = (number + before[:, None])[number < count[:, None]]
    starts.ravel()[np.flatnonzero(units)[begins]] = True
    return starts


def _choose_tokens(keys, maskable, wanted, slots):
    """`wanted` tokens per row, every set of that size alike: positions, uint32 [batch, slots], ascending, and
    `length` in the slots left over."""
    length = maskable.shape[1]
    order = _shuffled(keys, noise.counters(TOKENS, length), maskable)[:, :slots]
    return _ascending(order, np.arange(slots) < wanted[:, None], length)


def _choose_units(keys, maskable, starts, wanted, slots):
    """Like _choose_tokens, but units in random order, each included while it fits in what `wanted` leaves."""
    length = maskable.shape[1]
    order = _shuffled(keys, np.cumsum(starts, axis=1, dtype=np.uint32), maskable)
    # Two units of a row whose hashes agree (1 row in 100 of 512 tokens, 1 in 3 of 65,536) count as one; none is split
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
    return _ascending(order, chosen, length)[:, :slots]


def _fill(order, starts, at, room):
    """Go on after the unit at column `at`, which did not fit: take each later unit that still does.

    order: uint32 [rows, length], tokens in their units' random order; starts: bool, True where a unit begins; at,
    room: int64 [rows], changed. Returns bool [rows, length], True at the tokens taken.
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
    """Sort each row's tokens by a hash of their counter: uint32 [batch, length], the position in the low bits, so
    that one sort of plain integers moves both; what may not be chosen is the highest number. uint64 where the row is
    longer than `SHORT`: there the position would leave too little of the hash.

    Tokens of equal hash come by position, which favours one only where such a pair straddles the last one chosen.
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


def _ascending(order, chosen, length):
    """Positions of the chosen entries of `order`, ascending, then `length`: uint32, of order's shape."""
    positions = (order & _position_mask(length, order.dtype)).astype(np.uint32, copy=False)
    np.copyto(positions, np.uint32(length), where=~chosen)
    positions.sort(axis=1)
    return positions


def _position_bits(length):
    return (length - 1).bit_length()


def _position_mask(length, dtype):
    return dtype.type((1 << _position_bits(length)) - 1)


def global_positions(tokens: np.ndarray, sep: int, number: int) -> np.ndarray:
    """i32[rows, number]: the position of each row's first token, then those of its separators in order, -1 where there
    are no more."""
    is_global = tokens == sep
    is_global[:, 0] = True
    row, position = np.nonzero(is_global)
    rank = (np.cumsum(is_global, axis=1) - 1)[row, position]  # 0, 1, .. within each row
    within = rank < number
    named = np.full((len(is_global), number), -1, np.int32)
    named[row[within], rank[within]] = position[within]
    return named
