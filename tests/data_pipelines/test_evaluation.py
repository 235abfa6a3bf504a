"""Evaluation sees a fixed set, each example once, and padding that counts nowhere."""

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.evaluation import evaluation_batches
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.segment_pairs import NEXT_SENTENCE, SENTENCE_ORDER, SegmentPairs
from tests.data_pipelines.corpora import FIRST, equal, random_documents, unmasked, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "c"
    return Corpus(write_corpus(path, [], heldout=random_documents(1, 40)))


def test_every_held_out_token_counts_once(corpus):
    examples = make_examples(PackedSentences(32), corpus, "heldout", 16, seed=0)
    batches = list(evaluation_batches(examples, limit=10**6))
    assert {batch["tokens"].shape for batch in batches} == {(16, 32)}
    texts = np.concatenate([unmasked(batch)[batch["segments"] > 0] for batch in batches])
    everything = corpus.parts[0].read("heldout", "tokens", np.array([0]), corpus.parts[0].lengths("heldout").sum())[0]
    assert sorted(texts[texts >= FIRST]) == sorted(everything)


@pytest.mark.parametrize("label", [NEXT_SENTENCE, SENTENCE_ORDER])
@pytest.mark.parametrize("limit", [1, 16, 21])
def test_the_limit_is_kept_and_the_last_batch_is_filled_with_rows_that_count_nowhere(corpus, limit, label):
    batches = list(
        evaluation_batches(make_examples(SegmentPairs(16, label=label), corpus, "heldout", 8, seed=0), limit)
    )
    assert len(batches) == -(-limit // 8)
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    assert (whole["segments"].any(axis=1) == (np.arange(len(whole["tokens"])) < limit)).all()
    assert (whole["prediction_weights"].any(axis=1) == (np.arange(len(whole["tokens"])) < limit)).all()
    assert (whole[label][limit:] == -1).all() and (whole[label][:limit] >= 0).any()


def test_the_set_is_the_same_every_time_and_spread_over_the_split(corpus):
    examples = make_examples(SegmentPairs(16), corpus, "heldout", 8, seed=0)
    first, again = (list(evaluation_batches(examples, 40)) for _ in range(2))
    assert all(map(equal, first, again))
    assert all(equal(batch, examples.build(0, rows)) for batch, rows in zip(first, examples.fixed(40), strict=True))
    some = np.concatenate([unmasked(batch) for batch in first])
    everything = np.concatenate([unmasked(batch) for batch in evaluation_batches(examples, 10**6)])
    places = [np.flatnonzero((everything == row).all(axis=1))[0] for row in some]
    assert max(places) > 0.9 * examples.number and len(set(places)) == 40
