"""The host half that objectives with masked tokens share: which rows, masked how."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.examples import masking as masking_rule
from data_pipelines.examples import packed_sentences, segment_pairs
from data_pipelines.examples.masking import Masking
from pretrain.objectives.objective import Examples, Spec

PAIRS, PACKED, PACKED_ACROSS = "segment-pairs", "packed-sentences", "packed-across-documents"


class Layout(NamedTuple):
    """How rows are made.

    spec: (length, Masking, label) -> Spec.   examples: (corpus, split, length, batch size, seed, Masking, label) ->
    Examples.   pairs: whether rows are pairs, which may have a label; the label is None otherwise.
    """

    spec: Callable[..., Spec]
    examples: Callable[..., Examples]
    pairs: bool


def _packed(across: bool) -> Layout:
    """across: whether attention crosses from document to document."""
    return Layout(
        lambda length, masking, label: packed_sentences.spec(length, masking),
        lambda *shape: packed_sentences.PackedSentences(*shape[:-1], cross_document_attention=across),
        pairs=False,
    )


LAYOUTS = {
    PAIRS: Layout(segment_pairs.spec, segment_pairs.SegmentPairs, pairs=True),
    PACKED: _packed(across=False),
    PACKED_ACROSS: _packed(across=True),
}


def check_layout(layout: str, label: str | None) -> None:
    """ValueError for an unknown layout or one without the pairs that the label `objective.LABEL` is of."""
    if layout not in LAYOUTS:
        raise ValueError(f"objective.layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if label and not LAYOUTS[layout].pairs:
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
    return LAYOUTS[layout].spec(length, masking, label)


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
    return LAYOUTS[layout].examples(corpus, split, length, batch_size, seed, masking, label)
