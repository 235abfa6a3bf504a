"""Texts with noise as inputs, and the texts themselves as targets (Lewis et al. 2020, arXiv:1910.13461, section 2.2).

    text                  A B C . D E .
    token masking         A _ C . _ E .
    token deletion        A C . E .
    text infilling        A _ . D _ E .     spans B C and, between D and E, none
    sentence permutation  D E . A B C .
    document rotation     C . D E . A B

A row has whole sentences of one document, as many as fit; a longer sentence is cut.
"""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples import chunks
from data_pipelines.examples.layout import Chosen
from data_pipelines.examples.masking import choose, ordinary_tokens
from data_pipelines.examples.text_to_text import Framed, as_batch

# Streams of a row's draws: changing a number changes the rows
COINS, ORDER, LENGTHS, PLACES, MASKED, RANDOM, DELETED = range(7)
LONGEST_SPAN = 1000  # tokens, on average


@dataclass(frozen=True)
class Noises:
    """Which noises are put on a text, in the order in which they are. Raises UserError for values out of range. The
    defaults are the paper's. The command of the published models (facebookresearch/fairseq, issue 1899) has random=0.1
    and span=3.5, and its spans count words, not tokens."""

    permute: float = 1.0  # share of the rows whose sentences are put in a random order
    infill: float = 0.3  # share of the tokens that are in spans, each of which becomes one [MASK]
    span: float = 3.0  # mean length of spans, which is Poisson distributed; an empty span inserts a [MASK]
    mask: float = 0.0  # share of the tokens of which each becomes a [MASK]
    delete: float = 0.0  # share of the tokens that are left out
    rotate: float = 0.0  # share of the rows that begin at a random token, and end with what was before it
    random: float = 0.0  # share of the [MASK]s that are random tokens instead

    def __post_init__(self):
        shares = {name: share for name, share in asdict(self).items() if name != "span"}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise UserError(f"objective.noises.{name}={share}: must be from 0 to 1")
        if not 1 <= self.span <= LONGEST_SPAN:
            raise UserError(f"objective.noises.span={self.span}: must be from 1 to {LONGEST_SPAN} (BART: 3)")
        if self.delete == 1:
            raise UserError("objective.noises.delete=1.0: leaves no input; use a share below 1")
        if (hidden := self.infill + self.mask + self.delete) > 1:
            raise UserError(f"objective.noises: infill + mask + delete is {hidden:g}, above 1; lower one")
        if not any(share for name, share in shares.items() if name != "random"):
            raise UserError("objective.noises: all are 0, so that inputs are targets; set at least one above 0")
        if self.random and not self.masks:
            raise UserError(f"objective.noises.random={self.random}: has no effect without infill or mask; unset it")
        if self.span != type(self).span and not self.infill:
            raise UserError(f"objective.noises.span={self.span}: has no effect without infill; set it to 3")

    @property
    def masks(self) -> bool:
        """Whether inputs have [MASK]s."""
        return bool(self.infill or self.mask)


class Plan(NamedTuple):
    """units: where sentences begin, in tokens, then the end; int64. rows: the units that begin rows, then the number of
    units; int64. ordinary: the tokens to draw random ones from, int32."""

    part: Any
    split: str
    units: np.ndarray
    rows: np.ndarray
    ordinary: np.ndarray
    number: int  # examples per epoch


@dataclass(frozen=True)
class Denoising(Framed):
    """Rows of a text with noise as the input and the text as the target, both framed; the frame has no noise.

    Infilling draws the lengths of spans until they have the tokens to hide, at which the last one ends, or until there
    are as many spans as tokens to hide; all places of these spans between the other tokens are equally likely. An empty
    span is left out if the input would be longer than `length` with it; no other noise makes the input longer than the
    target. Shares of tokens are rounded, but each noise takes at least one token, and deletion leaves one.

    Raises UserError if target_length is not length.
    """

    noises: Noises = Noises()

    def __post_init__(self):
        super().__post_init__()
        if self.target_length != self.length:
            raise UserError(f"target_length={self.target_length}: must be that of inputs; set it to {self.length}")

    def room(self, special: Mapping[str, int]) -> int:
        """Return the most tokens of text in a row."""
        return self.length - 1 - len(self.frame(special)[0])

    def examples_of(self, sizes):
        return max(sizes["documents"], -(-sizes["tokens"] // (self.length - 1)))

    def check(self, corpus: Corpus):
        super().check(corpus)
        if self.noises.masks:
            corpus.require("mask")
        sizes = corpus.size("train")
        if self.noises.permute and sizes["sentences"] == sizes["documents"]:
            raise UserError(
                f"objective.noises.permute={self.noises.permute}: each document of corpus {corpus.path} is one "
                "sentence, so that there is no order; set it to 0"
            )

    def plan(self, part, split: str, seed: int) -> Plan:
        room = self.room(part.corpus.special)
        units = chunks.units(part.sentences(split), longest=room, piece=room)
        documents = np.searchsorted(units, chunks.document_starts(part, split))
        ends = np.searchsorted(units, units[:-1] + room, "right") - 1
        rows = chunks.follow(np.minimum(ends, np.repeat(documents[1:], np.diff(documents))))
        return Plan(part, split, units, rows, ordinary_tokens(part.corpus), len(rows) - 1)

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        corpus = chosen.plans[0].part.corpus
        opening, start, end = self.frame(corpus.special)
        begins, sizes = chosen.gather(_stretches)
        text = chosen.read("tokens", begins, self.room(corpus.special)).astype(np.int32)
        noised, left = self._noised(chosen, keys, text, sizes)

        def framed(tokens, sizes):
            row = np.pad(tokens, ((0, 0), (len(opening), 1)))
            row[:, : len(opening)] = opening
            row[np.arange(len(row)), len(opening) + sizes] = end
            return row

        ends = len(opening) + left, len(opening) + sizes
        return as_batch(framed(noised, left), framed(text, sizes), start, ends)

    def _noised(self, chosen, keys, text, sizes):
        """Return the noised texts, int32 [n, room], and their sizes."""
        noises, special = self.noises, chosen.plans[0].part.corpus.special
        tokens, left, coins = text, sizes, noise.bits(keys, noise.counters(COINS, 3))
        if noises.permute:
            tokens = _permuted(chosen, keys, text, sizes, _is_chosen(coins[:, 0], noises.permute))
        marks = np.zeros(text.shape, bool)
        if noises.infill:
            tokens, marks, left = _infilled(noises, keys, tokens, sizes)
        real = np.arange(text.shape[1]) < left[:, None]
        if noises.mask:
            marks |= _some(keys, MASKED, real & ~marks, _share(noises.mask, sizes))
        if noises.masks:
            tokens = tokens.copy()
            tokens[marks] = special["mask"]
        if noises.random:
            row, column = np.nonzero(marks)
            draws = noise.each(keys[row], noise.counters(RANDOM, text.shape[1])[column])
            few, ordinary = _is_chosen(draws, noises.random), chosen.plans[0].ordinary
            # Below the limit the draw is uniform, so it also picks the token
            choice = draws[few] * np.int64(len(ordinary)) // _limit(noises.random)
            tokens[row[few], column[few]] = ordinary[choice]
        if noises.delete:
            gone = _some(keys, DELETED, real & ~marks, np.minimum(_share(noises.delete, sizes), left - 1))
            kept, left = tokens[real & ~gone], left - np.count_nonzero(gone, axis=1)
            tokens = np.zeros_like(text)
            tokens[np.arange(text.shape[1]) < left[:, None]] = kept
        if noises.rotate:
            first = noise.below(coins[:, 2], left) * _is_chosen(coins[:, 1], noises.rotate)
            turned = (first[:, None] + np.arange(text.shape[1])) % left[:, None]
            tokens = np.take_along_axis(tokens, turned, axis=1)
        return tokens, left


def _stretches(plan, _, example):
    """Return where rows begin, in tokens, and their tokens: int64 [n] each."""
    begins, ends = plan.units[plan.rows[example]], plan.units[plan.rows[example + 1]]
    return begins, ends - begins


def _permuted(chosen, keys, text, sizes, shuffled):
    """Return texts with their sentences in a random order where `shuffled`, bool [n], says so: int32 [n, room]."""
    found = []
    for plan, index, example in chosen.groups:
        first = plan.rows[example]
        row, rank = chunks.ranks(plan.rows[example + 1] - first)
        unit = first[row] + rank
        of_all = np.arange(len(text))[index][row]
        begins = plan.units[unit] - plan.units[first][row] + of_all * text.shape[1]
        found.append((of_all, rank, begins, plan.units[unit + 1] - plan.units[unit]))
    row, rank, begins, lengths = map(np.concatenate, zip(*found, strict=True))
    draws = noise.each(keys[row], noise.counters(ORDER, rank.max() + 1)[rank])
    order = np.argsort(row << 32 | np.where(shuffled[row], draws, rank), kind="stable")
    begins, lengths = begins[order], lengths[order]
    sentence, place = chunks.ranks(lengths)
    permuted = text.copy()
    permuted[np.arange(text.shape[1]) < sizes[:, None]] = text.ravel()[begins[sentence] + place]
    return permuted


def _infilled(noises, keys, text, sizes):
    """Replace spans of texts (int32 [n, room], sizes int64 [n]) by one token each. Returns the texts, these tokens'
    places, bool [n, room], and the new sizes."""
    room, hidden = text.shape[1], _share(noises.infill, sizes)[:, None]
    number = np.arange(hidden.max())
    lengths = poisson(noises.span, noise.bits(keys, noise.counters(LENGTHS, len(number))))
    before = np.cumsum(lengths, axis=1) - lengths
    drawn = (before < hidden) & (number < hidden)
    lengths = np.where(drawn, np.minimum(lengths, hidden - before), 0)
    left, is_empty = sizes - lengths.sum(axis=1), drawn & (lengths == 0)
    allowed = room - left - np.count_nonzero(lengths, axis=1)
    drawn &= ~is_empty | (np.cumsum(is_empty, axis=1) <= allowed[:, None])
    spans = np.count_nonzero(drawn, axis=1)
    left += spans
    places = choose(keys, PLACES, np.arange(room) < left[:, None], spans, spans.max())
    used = np.arange(spans.max()) < spans[:, None]
    row, place = np.nonzero(used)[0], places[used]
    steps, marks = np.ones(text.shape, np.int64), np.zeros(text.shape, bool)
    steps[row, place], marks[row, place] = lengths[drawn], True
    source = np.minimum(np.cumsum(steps, axis=1) - steps, room - 1)
    return np.take_along_axis(text, source, axis=1), marks, left


def _some(keys, stream, allowed, wanted):
    """Choose `wanted` (int64 [n]) of the allowed places, or all if there are fewer: bool [n, room], like `allowed`."""
    wanted = np.minimum(wanted, np.count_nonzero(allowed, axis=1))
    places = choose(keys, stream, allowed, wanted, wanted.max(initial=0)).astype(np.int64)
    some = np.zeros((len(allowed), allowed.shape[1] + 1), bool)  # the last column takes what is not used
    np.put_along_axis(some, places, True, axis=1)
    return some[:, :-1]


def _share(share, sizes):
    """Return how many tokens of each text a noise takes: int64 [n]."""
    return np.maximum(np.rint(share * sizes).astype(np.int64), 1)


def _limit(share):
    return round(share * 2**32)


def _is_chosen(bits, share):
    """Return which draws, uint32, are among this share of all: bool."""
    return bits < _limit(share)


def poisson(mean: float, bits: np.ndarray) -> np.ndarray:
    """Return Poisson distributed numbers from uint32 bits: int64. Each probability is exact to 2**-32."""
    return np.searchsorted(_below(mean), bits, "right")


@functools.cache
def _below(mean):
    """Return how many of 2**32 draws are at most 0, 1, ...: uint64."""
    number = np.arange(1, int(mean + 12 * mean**0.5) + 30)
    logs = np.append(0, np.cumsum(np.log(mean / number))) - mean
    return np.rint(np.cumsum(np.exp(logs)) * 2**32).astype(np.uint64)
