"""Text with spans replaced by sentinels, and the spans as the target (Raffel et al. 2020, arXiv:1910.10683,
section 3.1.4, and the published `random_spans_noise_mask`), planned so that inputs and targets are full.

    text    Thank you for inviting me to your party last week
    input   Thank you <0> me to your party <1> week </s>
    target  <0> for inviting <1> last </s>
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Chosen
from data_pipelines.examples.text_to_text import Stretches, as_batch

NOISE, TEXT = range(2)  # streams of draws: the lengths of spans, and of the text between them


@dataclass(frozen=True)
class Corruption:
    """Which tokens are replaced. Raises UserError for values out of range."""

    density: float = 0.15  # share of the tokens to replace
    span: float = 3.0  # mean number of tokens in a span

    def __post_init__(self):
        if not 0 < self.density < 1:
            raise UserError(f"objective.corruption.density={self.density}: must be above 0 and below 1 (T5: 0.15)")
        if not 1 <= self.span < 2**31:
            raise UserError(f"objective.corruption.span={self.span}: must be at least 1 and below 2**31 (T5: 3)")


class Sizes(NamedTuple):
    """For each row: tokens that are replaced, tokens that stay, and the spans of each kind, which alternate."""

    noise: int
    text: int
    spans: int

    @property
    def input(self) -> int:
        """Tokens of the input: the text that stays, a sentinel for each span, and the end."""
        return self.text + self.spans + 1

    @property
    def target(self) -> int:
        """Tokens of the target: a sentinel before each span, the span, and the end."""
        return self.noise + self.spans + 1


@functools.cache
def sizes_of(length: int, corruption: Corruption) -> Sizes:
    """Return the sizes of the longest text whose input has `length` tokens. Raises UserError if there is none."""

    def of(tokens: int) -> Sizes:
        hidden = min(max(round(tokens * corruption.density), 1), tokens - 1)
        spans = min(max(round(hidden / corruption.span), 1), tokens - hidden)
        return Sizes(hidden, tokens - hidden, spans)

    tokens = 2
    while of(tokens + 1).input <= length:
        tokens += 1
    found = of(tokens)
    if found.input != length:
        raise UserError(
            f"length={length}: no text fills an input of so many tokens at objective.corruption.density="
            f"{corruption.density}, span={corruption.span}; use {found.input}"
        )
    return found


@dataclass(frozen=True)
class SpanCorruption(Stretches):
    """Stretches of text with spans replaced, which fill inputs and targets. Raises UserError if target_length is not
    the length that follows from the other settings."""

    corruption: Corruption = Corruption()

    def __post_init__(self):
        super().__post_init__()
        if self.sizes.target != self.target_length:
            raise UserError(
                f"target_length={self.target_length}: at length={self.length}, objective.corruption.density="
                f"{self.corruption.density}, span={self.corruption.span} targets have {self.sizes.target} tokens; "
                f"set it to {self.sizes.target}"
            )

    @property
    def sizes(self) -> Sizes:
        """The sizes of each row."""
        return sizes_of(self.length, self.corruption)

    @property
    def size(self):
        return self.sizes.noise + self.sizes.text

    def check(self, corpus):
        super().check(corpus)
        if len(sentinels(corpus.special)) < self.sizes.spans:
            raise UserError(
                f"corpus {corpus.path} has {len(sentinels(corpus.special))} sentinels, but rows of length "
                f"{self.length} need {self.sizes.spans}; prepare it with --specials t5, or with --sentinels 100"
            )

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        text, special, end = self.stretches(chosen)
        hidden, begins = self._spans(keys)
        marks = np.array(sentinels(special)[: self.sizes.spans], np.int32)

        def kept(stays, replaced):  # the text that stays, and a sentinel for each replaced span
            with_marks = text.copy()
            with_marks[replaced] = np.tile(marks, len(text))
            return np.pad(with_marks[stays | replaced].reshape(len(text), -1), ((0, 0), (0, 1)), constant_values=end)

        return as_batch(kept(~hidden, begins & hidden), kept(hidden, begins & ~hidden), special["pad"])

    def _spans(self, keys):
        """Return which tokens are hidden, and which begin a span of either kind: bool [n, tokens]."""
        sizes = self.sizes
        lengths = np.empty((len(keys), 2 * sizes.spans), np.int64)
        lengths[:, ::2] = _parts(noise.bits(keys, noise.counters(TEXT, sizes.text - 1)), sizes.spans)
        lengths[:, 1::2] = _parts(noise.bits(keys, noise.counters(NOISE, sizes.noise - 1)), sizes.spans)
        starts = np.cumsum(lengths, axis=1) - lengths
        begins = np.zeros((len(keys), sizes.noise + sizes.text), bool)
        np.put_along_axis(begins, starts, True, axis=1)
        return np.cumsum(begins, axis=1) % 2 == 0, begins


def _parts(bits: np.ndarray, parts: int) -> np.ndarray:
    """Divide n + 1 tokens into `parts` lengths of at least 1, all divisions equally likely: int64 [rows, parts].
    bits: uint32 [rows, n], one for each place between two tokens; the places with the smallest ones are cut."""
    number = bits.shape[1] + 1
    cuts = np.sort(np.argsort(bits, axis=1, kind="stable")[:, : parts - 1], axis=1) + 1
    ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, number)))
    return np.diff(ends, axis=1)


def sentinels(special) -> list[int]:
    """Return the tokens of sentinels 0, 1, ..., from the special tokens by role."""
    found = []
    while f"sentinel_{len(found)}" in special:
        found.append(special[f"sentinel_{len(found)}"])
    return found
