"""Static masks: a row is made in so many fixed ways, which epochs take in turn; else anew in every epoch."""

from collections import Counter

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.global_tokens import GlobalTokens
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.order import Order
from tests.data_pipelines.corpora import epoch, equal, random_documents, unmasked, write_corpus

LAYOUTS = {
    "pairs": SegmentPairs,
    "packed": PackedSentences,
    "with global tokens": lambda length, **masked: GlobalTokens(length, PackedSentences(length, **masked), 1),
}
COPIES = 3


@pytest.fixture(scope="module", params=[1, 3], ids=["one part", "three parts"])
def corpus(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "c"
    return Corpus(write_corpus(path, random_documents(0, 60), parts=request.param))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_epochs_repeat_exactly_after_as_many_as_there_are_copies(corpus, layout):
    examples = make_examples(layout(32, masks=Masking(copies=COPIES)), corpus, "train", 4, seed=7)
    found = [epoch(examples, number) for number in range(2 * COPIES)]
    for number in range(COPIES):
        assert equal(found[number], found[number + COPIES])
        assert not np.array_equal(found[number]["tokens"], found[(number + 1) % COPIES]["tokens"])
    anew = make_examples(layout(32), corpus, "train", 4, seed=7)
    assert equal(epoch(anew, 2), found[2]), "the copies are those of the first epochs"
    assert not np.array_equal(epoch(anew, COPIES)["tokens"], found[0]["tokens"])


def test_rows_come_in_another_order_in_every_epoch(corpus):
    layout, order = PackedSentences(32, masks=Masking(copies=1)), Order(2, 1)
    examples = make_examples(layout, corpus, "train", 2, 7, order)
    steps = -(-examples.number // 2)
    rows = [[bytes(row) for row in examples.batch(step, np.arange(2))["tokens"]] for step in range(2 * steps + 2)]
    first, second = ([row for pair in rows[begin : begin + steps] for row in pair] for begin in (0, steps))
    assert first != second
    shared = Counter(first) & Counter(second)
    assert sum(shared.values()) >= examples.number - 4  # lanes' epochs do not end at the same step


def test_evaluations_are_what_they_are_with_masks_drawn_anew(corpus):
    of = lambda masks: epoch(make_examples(PackedSentences(32, masks), corpus, "train", 4, seed=7))
    assert equal(of(Masking()), of(Masking(copies=5)))
    assert np.array_equal(unmasked(of(Masking())), unmasked(of(Masking(copies=5))))


def test_fewer_than_no_copies_are_an_error():
    with pytest.raises(UserError, match="objective.masking.copies=-1: must be at least 0"):
        Masking(copies=-1)
