"""Rows of an input, which an encoder reads, and a target, which a decoder predicts: from documents of two segments, or
from a text that is cut in two (Raffel et al. 2020, arXiv:1910.10683, sections 2.4 and 3.2.3)."""

import abc
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import DocumentStream, end_token, whole
from data_pipelines.examples.layout import Chosen, Feature, RowLayout
from data_pipelines.examples.next_tokens import DocumentsPlan, PairLayout, PairsPlan
from data_pipelines.tokenizers.made import text_end

PAD, END = "pad", "end"  # start tokens of decoders
CUT = 0  # the stream of draws for where a text is cut


@dataclass(frozen=True)
class TextToText(RowLayout):
    """Base of text-to-text layouts. A batch holds tokens and segments [length] for the encoder; decoder_tokens (the
    start token, then the targets shifted by one), decoder_segments, targets and weights [target_length] for the
    decoder. Segments and weights are 1, and 0 at padding. least_target: the shortest target_length."""

    least, least_target = 4, 2

    target_length: int

    def __post_init__(self):
        super().__post_init__()
        if self.target_length < self.least_target:
            raise UserError(f"target_length={self.target_length}: no room for text; use at least {self.least_target}")

    @property
    def tokens(self) -> int:
        return self.length + self.target_length

    @property
    def spec(self) -> dict[str, Feature]:
        encoder, decoder = Feature((self.length,)), Feature((self.target_length,))
        arrays = dict.fromkeys(("tokens", "segments"), encoder)
        arrays |= dict.fromkeys(("decoder_tokens", "decoder_segments", "targets"), decoder)
        return arrays | {"weights": decoder._replace(dtype=np.float32)}

    def check(self, corpus):
        end_token(corpus)
        corpus.require("pad")


@dataclass(frozen=True)
class Framed(TextToText):
    """Base of layouts with a frame around inputs and targets: an end token after them and, if `start` is END and the
    vocabulary has it, the cls token before them (BART).   start: the decoder's start token, PAD or END."""

    _: KW_ONLY
    start: str = PAD

    @property
    def least_target(self):
        return 2 + (self.start == END)

    def frame(self, special: Mapping[str, int]) -> tuple[list[int], int, int]:
        """Return the tokens before inputs and targets, the start token, and the end token."""
        start, end = start_token(special, self.start), text_end(special)
        return opening(special, start), start, end


@dataclass(frozen=True)
class Pairs(PairLayout, Framed):
    """Rows of one document each, of two segments: an encoder row with the token of the document's value, if it has one,
    and the input; and a decoder row with the target. Both are framed, and cut at their ends if they do not fit."""

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        tokens, inputs, targets, ends = chosen.gather(self._read)
        return as_batch(tokens, targets, self.frame(chosen.plans[0].part.corpus.special)[1], (inputs, ends))

    def _read(self, plan: PairsPlan, _, example: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return inputs and targets, int32 [n, length] and [n, target_length], and where they end, int64 [n] each."""
        first, _, end = self.frame(plan.part.corpus.special)
        lead = len(first)

        def read(begins, sizes, length, lead):
            sizes = np.minimum(sizes + lead, length - 1)
            row = plan.part.read(plan.split, "tokens", begins - lead, length).astype(np.int32)
            row[:, : len(first)] = first
            row[np.arange(len(row)), sizes] = end
            return row, sizes

        prefixed = plan.prefixes is not None
        tokens, inputs = read(plan.input_begins[example], plan.inputs[example], self.length, lead + prefixed)
        targets, ends = read(plan.target_begins[example], plan.targets[example], self.target_length, lead)
        if prefixed:
            tokens[:, lead] = plan.prefixes[example]
        return tokens, inputs, targets, ends


@dataclass(frozen=True)
class Stretches(TextToText):
    """Base of layouts that cut a part's documents, one after the other and each with its end token, every `size`
    tokens. The last row ends with the part, so it overlaps the one before."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Tokens of text in each row."""

    def examples_of(self, sizes):
        return -(-(sizes["tokens"] + sizes["documents"]) // self.size)

    def plan(self, part, split: str, seed: int) -> DocumentsPlan:
        stream = DocumentStream([whole(part, split)], split, seed, 0)
        return DocumentsPlan(stream, -(-stream.total // self.size) if stream.total >= self.size else 0)

    def stretches(self, chosen: Chosen) -> tuple[np.ndarray, Mapping[str, int], int]:
        """Return the text of each row, int32 [n, size], the special tokens by role, and the end token of documents."""

        def read(plan: DocumentsPlan, _, example: np.ndarray) -> tuple[np.ndarray]:
            start = np.minimum(example * self.size, plan.stream.total - self.size)
            tokens, _ = plan.stream.read(start, np.full(len(start), self.size))
            return (tokens.reshape(len(start), self.size),)

        stream = chosen.plans[0].stream
        return chosen.gather(read)[0], stream.special, stream.end


@dataclass(frozen=True)
class Halves(Stretches):
    """Rows of a text that is cut anywhere: the first part is the input (a prefix language model), the rest the target,
    and an end token follows each. With `causal` all of the text is the target, and the input is only an end token."""

    least_target = 3

    causal: bool = False

    @property
    def size(self):
        return (self.target_length if self.causal else min(self.length, self.target_length)) - 1

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        text, special, end = self.stretches(chosen)
        cut = 1 + noise.below(noise.bits(keys, noise.counters(CUT, 1))[:, 0], self.size - 1)
        cut = np.zeros_like(cut) if self.causal else cut

        def row(begin, sizes, length):
            at = begin[:, None] + np.arange(length)
            tokens = np.take_along_axis(text, np.minimum(at, self.size - 1), axis=1)
            tokens[np.arange(len(text)), sizes] = end
            return tokens

        tokens, targets = row(np.zeros_like(cut), cut, self.length), row(cut, self.size - cut, self.target_length)
        return as_batch(tokens, targets, special["pad"], (cut, self.size - cut))


def as_batch(
    tokens: np.ndarray, targets: np.ndarray, start: int, ends: tuple[np.ndarray, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Return the batch of inputs and targets, int32 [n, length] and [n, target_length].   start: the token before each
    target's first.   ends: of both, int64 [n], the places of the end tokens, before padding; None if rows are full."""

    def real(array, ends):
        return (np.arange(array.shape[1]) <= ends[:, None]).astype(np.int32)

    both = tokens, targets
    of_input, of_target = map(np.ones_like, both) if ends is None else map(real, both, ends)
    targets = targets * of_target
    shifted = np.insert(targets[:, :-1], 0, start, axis=1)
    arrays = {"tokens": tokens * of_input, "segments": of_input, "decoder_tokens": shifted}
    arrays |= {"decoder_segments": of_target, "targets": targets}
    return arrays | {"weights": of_target.astype(np.float32)}


def start_token(special: Mapping[str, int], start: str) -> int | None:
    """Return the start token PAD or END; None if the vocabulary lacks it."""
    return special.get("pad") if start == PAD else text_end(special)


def opening(special: Mapping[str, int], start: int) -> list[int]:
    """Return the tokens before inputs and targets of a model with this start token."""
    return [special["cls"]] if start != special.get("pad") and "cls" in special else []
