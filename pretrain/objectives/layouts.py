"""The host half that objectives with masked tokens share: which rows, masked how."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.examples import masking as masking_rule
from data_pipelines.examples import packed_sentences, segment_pairs
from data_pipelines.examples.masking import Masking
from pretrain.objectives.objective import Examples, Spec

PAIRS, PACKED, PACKED_ACROSS = "segment-pairs", "packed-sentences", "packed-across-documents"
LAYOUTS = (PAIRS, PACKED, PACKED_ACROSS)  # the last lets attention cross from document to document


def check_layout(layout: str, label: str | None) -> None:
    """ValueError for an unknown layout or one without the pairs that the label `objective.LABEL` is of."""
    if layout not in LAYOUTS:
        raise ValueError(f"objective.layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if label and layout != PAIRS:
        raise ValueError(f"objective.layout={layout!r} has no pairs: use {PAIRS!r} or objective.{label}=False")


def check_corpus(corpus: Corpus) -> None:
    """UserError when the corpus lacks a special token that the layouts put in."""
    masking_rule.SpecialTokens.of(corpus)


def predictions(length: int, masking: Masking) -> int:
    """Positions per row at which the vocabulary's logits are computed."""
    return masking_rule.predictions(length, masking.rate)


def targets(batches: Iterable[Mapping[str, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(targets, weights) of each host batch."""
    return ((batch["prediction_targets"], batch["prediction_weights"]) for batch in batches)


def spec(layout: str, length: int, masking: Masking, label: str | None) -> Spec:
    """The arrays of a batch of this layout; label: of pairs, by its name, None for none."""
    if layout == PAIRS:
        return segment_pairs.spec(length, masking, label)
    return packed_sentences.spec(length, masking)


def examples(
    layout: str,
    corpus: Corpus,
    split: str,
    length: int,
    batch_size: int,
    seed: int,
    masking: Masking,
    label: str | None,
) -> Examples:
    """Rows of this layout on a split of a corpus."""
    shape = (corpus, split, length, batch_size, seed, masking)
    if layout == PAIRS:
        return segment_pairs.SegmentPairs(*shape, label)
    return packed_sentences.PackedSentences(*shape, cross_document_attention=layout == PACKED_ACROSS)
