"""The host half that objectives with masked tokens share: which rows, masked how."""

from collections.abc import Callable
from typing import NamedTuple

from data_pipelines.examples.layout import RowLayout
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.segment_pairs import SegmentPairs, SentencePairs

PAIRS, SENTENCE_PAIRS = "segment-pairs", "sentence-pairs"
PACKED, PACKED_ACROSS, ONE_DOCUMENT = "packed-sentences", "packed-across-documents", "document-sentences"

PREDICTIONS = "prediction_targets", "prediction_weights"  # of a batch, the tokens that are predicted


class Rows(NamedTuple):
    """How rows are made.

    layout: (tokens per row, Masking, label) -> layout.
    pairs: whether rows are pairs, which may have a label, by its name; the label is None otherwise.
    """

    layout: Callable[[int, Masking, str | None], RowLayout]
    pairs: bool


LAYOUTS = {
    PAIRS: Rows(SegmentPairs, pairs=True),
    SENTENCE_PAIRS: Rows(SentencePairs, pairs=True),
    PACKED: Rows(lambda length, masking, _: PackedSentences(length, masking), pairs=False),
    PACKED_ACROSS: Rows(lambda length, masking, _: PackedSentences(length, masking, True), pairs=False),
    ONE_DOCUMENT: Rows(lambda length, masking, _: PackedSentences(length, masking, one_document=True), pairs=False),
}


def check_layout(layout: str, label: str | None) -> None:
    """ValueError for an unknown layout or one without the pairs that the label `objective.LABEL` is of."""
    if layout not in LAYOUTS:
        raise ValueError(f"objective.layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if label and not LAYOUTS[layout].pairs:
        raise ValueError(f"objective.layout={layout!r} has no pairs: use {PAIRS!r} or objective.{label}=False")
