"""The host half that objectives with masked tokens share: which rows, masked how."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.examples import masking as masking_rule
from data_pipelines.examples import packed_sentences, segment_pairs
from data_pipelines.examples.masking import Masking
from pretrain.objectives.objective import Examples, Spec
from pretrain.objectives.phase import Phase

PAIRS, PACKED, PACKED_ACROSS = "segment-pairs", "packed-sentences", "packed-across-documents"


class Layout(NamedTuple):
    """How rows are made.

    spec: (Phase, Masking, label) -> Spec.   examples: (corpus, split, Phase, seed, Masking, label) -> Examples.
    pairs: whether rows are pairs, which may have a label, by its name; the label is None otherwise.
    """

    spec: Callable[[Phase, Masking, str | None], Spec]
    examples: Callable[[Corpus, str, Phase, int, Masking, str | None], Examples]
    pairs: bool


def _pairs() -> Layout:
    def examples(corpus: Corpus, split: str, phase: Phase, seed: int, masking: Masking, label: str | None) -> Examples:
        return segment_pairs.SegmentPairs(corpus, split, phase.length, phase.batch_size, seed, masking, label)

    return Layout(lambda phase, *rest: segment_pairs.spec(phase.length, *rest), examples, pairs=True)


def _packed(across: bool) -> Layout:
    """across: whether attention crosses from document to document."""

    def examples(corpus: Corpus, split: str, phase: Phase, seed: int, masking: Masking, label: None) -> Examples:
        shape = (corpus, split, phase.length, phase.batch_size, seed, masking)
        return packed_sentences.PackedSentences(*shape, cross_document_attention=across)

    return Layout(lambda phase, masking, label: packed_sentences.spec(phase.length, masking), examples, pairs=False)


LAYOUTS = {PAIRS: _pairs(), PACKED: _packed(across=False), PACKED_ACROSS: _packed(across=True)}


def check_layout(layout: str, label: str | None) -> None:
    """ValueError for an unknown layout or one without the pairs that the label `objective.LABEL` is of."""
    if layout not in LAYOUTS:
        raise ValueError(f"objective.layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if label and not LAYOUTS[layout].pairs:
        raise ValueError(f"objective.layout={layout!r} has no pairs: use {PAIRS!r} or objective.{label}=False")


def check_corpus(corpus: Corpus) -> None:
    """UserError when the corpus lacks a special token that the layouts put in."""
    masking_rule.SpecialTokens.of(corpus)


def predictions(phase: Phase, masking: Masking) -> int:
    """Positions per row at which the vocabulary's logits are computed."""
    return masking_rule.predictions(phase.length, masking.rate)


def targets(batches: Iterable[Mapping[str, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(targets, weights) of each host batch."""
    return ((batch["prediction_targets"], batch["prediction_weights"]) for batch in batches)
