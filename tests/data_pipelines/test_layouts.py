"""Every way to make rows: what models may count on in all, and a hash of each that tells when its batches change.

A change of a hash makes other batches of the same corpus, recipe and seed: a run that goes on is another run. After a
change that is meant, put what this prints in place of the hashes:

    python -m tests.data_pipelines.test_layouts
"""

import functools
import hashlib
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest

from data_pipelines import noise
from data_pipelines.batches import evaluation_batches, make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.next_tokens import ContiguousStreams, InputTarget, PackedDocuments, StridedDocuments
from data_pipelines.examples.packed_sentences import PackedSentences, SentenceGlobals
from data_pipelines.examples.permutations import PermutedSpans, Permuting
from data_pipelines.examples.segment_pairs import NEXT_SENTENCE, SENTENCE_ORDER, SegmentPairs, SentencePairs
from data_pipelines.examples.unified_pairs import UnifiedPairs
from tests.data_pipelines.corpora import (
    FIRST,
    SPECIAL,
    epoch,
    equal,
    fits,
    numbered,
    random_documents,
    unmasked,
    write_corpus,
)
from tests.data_pipelines.two_lengths import TwoWindows

ALBERT, MACBERT = (1, 1 / 2, 1 / 3), (0.4, 0.3, 0.2, 0.1)  # weights of n-grams
ONE_WAY = {"spans": False, "bidirectional": False}
LAYOUTS = {
    "pairs, next sentence": (SegmentPairs(32), "9980de8e40aa0781"),
    "pairs, sentence order": (SegmentPairs(32, label=SENTENCE_ORDER), "54afb31a4926a3e9"),
    "pairs, no label": (SegmentPairs(32, label=None), "a060c012ffe3d553"),
    "pairs, whole words": (SegmentPairs(32, Masking(unit="word_starts")), "fe9a1826e40ccfec"),
    "pairs, masked as ELECTRA's": (SegmentPairs(32, Masking(0.25, 0.85, 0.0), label=None), "ae16c0668180f179"),
    "pairs, n-grams as ALBERT's": (SegmentPairs(32, Masking(unit="word_starts", ngrams=ALBERT)), "4bce5446e9c11199"),
    "pairs of sentences": (SentencePairs(32), "a929273923fbae48"),
    "pairs of UniLM's tasks": (UnifiedPairs(32, Masking(ngrams=(0.8, 0.1, 0.1))), "214debedad0e55c7"),
    "packed": (PackedSentences(32), "8c16f1d578064a42"),
    "packed, whole words": (PackedSentences(32, Masking(unit="word_starts")), "a2e339332e06a4f3"),
    "packed, n-grams": (PackedSentences(32, Masking(unit="word_starts", ngrams=MACBERT)), "cfceb8478f7417d4"),
    "packed across documents": (PackedSentences(32, cross_document_attention=True), "ab3e30038d0a25a5"),
    "packed, of one document": (PackedSentences(32, one_document=True), "a1972e0b3455ed10"),
    "packed, two fixed copies": (PackedSentences(32, Masking(copies=2)), "47905a31eec31a33"),
    "packed, with global tokens": (SentenceGlobals(32, globals=3), "e492820617f778b0"),
    "pairs, which name global tokens": (SegmentPairs(32, global_tokens=2), "9f6d14c102b57935"),
    "documents": (PackedDocuments(32), "f7865c58abc5027f"),
    "documents, apart": (PackedDocuments(32, separate=True, restart=True), "17735a3cba09decb"),
    "stream": (ContiguousStreams(32), "f2a5ce2dda034efb"),
    "stream, reset": (ContiguousStreams(32, reset=True), "692dc52fbe19f20d"),
    "windows of two lengths": (TwoWindows(20, 12), "40a33ec7f3cc1e21"),
    "permuted spans": (PermutedSpans(32, Permuting(reuse_len=14, perm_size=8)), "5e52697bd7201d7f"),
    "permuted tokens, one way": (PermutedSpans(32, Permuting(0, k=4, perm_size=32, **ONE_WAY)), "d3812268a78ee418"),
}
NOISY = [name for name in LAYOUTS if not name.startswith(("documents", "stream", "windows"))]  # these draw nothing
ROWS = np.array([6, 0, 3, 7])  # as a host builds them: some, in any order


def written(path: Path) -> Corpus:
    """Documents of 1 to 6 sentences of 1 to 40 tokens, some longer than a row; every token is another one."""
    lengths = lambda document: [1 + (7 * document + 11 * sentence) % 40 for sentence in range(1 + document % 6)]
    train, heldout = numbered(map(lengths, range(25))), numbered(map(lengths, range(25, 37)))
    return Corpus(write_corpus(path, train, 2500, heldout, special=SPECIAL | {"eod": 2499}))


def digest(layout, corpus: Corpus) -> str:
    """Of two epochs' steps, some rows of each in another order than theirs, and of an evaluation."""
    train = make_examples(layout, corpus, "train", 8, seed=7)
    batches = [train.batch(step, ROWS) for step in range(2 * train.number // 8 + 1)]
    batches += evaluation_batches(make_examples(layout, corpus, "heldout", 8, seed=7), limit=12)
    found = hashlib.sha256()
    for batch in batches:
        for name, array in sorted(batch.items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return written(tmp_path_factory.mktemp("corpus") / "c")


@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_are_what_they_were(name, corpus):
    layout, golden = LAYOUTS[name]
    assert digest(layout, corpus) == golden


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_built_together_are_those_built_apart_and_as_the_spec_says(name, corpus):
    layout, _ = LAYOUTS[name]
    examples = make_examples(layout, corpus, "train", 8, seed=5)
    last = getattr(examples, "steps", examples.number // 8) - 1
    for step in (0, last):  # the rows from 8 on are those of the next step, which may be in the next epoch
        whole = examples.batch(step, np.arange(16))
        assert fits(whole, layout)
        for rows in (np.array([0]), np.arange(3, 12), np.array([15, 2, 7])):
            assert equal(examples.batch(step, rows), {name: array[rows] for name, array in whole.items()})
        other = pickle.loads(pickle.dumps(examples))  # as it goes to a worker
        assert equal(other.batch(step + 1, np.arange(8)), {name: array[8:] for name, array in whole.items()})


@pytest.fixture
def drawn(monkeypatch):
    """(keys u64[n], counters u32[n, m]) of every draw from keys of rows, which differ; a plan's is the same for all."""
    draws, bits = [], noise.bits

    def recorded(keys, counters):
        if not isinstance(keys, int) and len(set(keys.tolist())) > 1:
            draws.append((keys, np.broadcast_to(counters, (len(keys), counters.shape[-1]))))
        return bits(keys, counters)

    monkeypatch.setattr(noise, "bits", recorded)
    return draws


@pytest.mark.parametrize("name", NOISY)
def test_keys_are_of_the_seed_the_epoch_and_the_example_and_no_two_uses_share_a_number(name, corpus, drawn):
    found = []
    for seed, number in ((0, 0), (0, 1), (1, 0)):
        drawn.clear()
        make_examples(LAYOUTS[name][0], corpus, "train", 8, seed).build(number, ROWS)
        keys = drawn[0][0]
        assert all(np.array_equal(keys, others) for others, _ in drawn)
        found += keys.tolist()
        for row in range(len(ROWS)):
            uses = [set(counters[row].tolist()) for _, counters in drawn]  # in one use, a word's tokens share theirs
            assert len(uses) >= 2 and sum(map(len, uses)) == len(set.union(*uses))
    assert len(set(found)) == 3 * len(ROWS)


# Static masks: a row is made in so many fixed ways, which epochs take in turn

MASKED = {
    "pairs": SegmentPairs,
    "packed": PackedSentences,
    "with global tokens": functools.partial(PackedSentences, global_tokens=1),
}


@pytest.fixture(scope="module", params=[1, 3], ids=["one part", "three parts"])
def of_parts(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "c"
    return Corpus(write_corpus(path, random_documents(0, 60), parts=request.param))


@pytest.mark.parametrize("layout", MASKED.values(), ids=MASKED)
def test_epochs_repeat_exactly_after_as_many_as_there_are_copies(of_parts, layout):
    examples = make_examples(layout(32, masks=Masking(copies=3)), of_parts, "train", 4, seed=7)
    found = [epoch(examples, number) for number in range(6)]
    for number in range(3):
        assert equal(found[number], found[number + 3])
        assert not np.array_equal(found[number]["tokens"], found[(number + 1) % 3]["tokens"])
    anew = make_examples(layout(32), of_parts, "train", 4, seed=7)
    assert equal(epoch(anew, 2), found[2]), "the copies are those of the first epochs"
    assert not np.array_equal(epoch(anew, 3)["tokens"], found[0]["tokens"])
    assert np.array_equal(unmasked(epoch(anew, 3)), unmasked(found[0])) or layout is SegmentPairs
    other = make_examples(layout(32), of_parts, "train", 4, seed=8)
    assert not np.array_equal(epoch(other, 0)["tokens"], found[0]["tokens"])


# What cannot be is an error before any step

ERRORS = [
    (lambda: PackedSentences(2), "length 2 leaves no room"),
    (lambda: ContiguousStreams(0), "length 0 leaves no room"),
    (lambda: PermutedSpans(256), "length 256 leaves no room .* reuse_len 256 .* use at most reuse_len 128"),
    (lambda: InputTarget(8, False, False), "has documents of text, where rows of input and target need two segments"),
    (lambda: ContiguousStreams(900), "tokens, too few for a batch of 4 rows of"),
    (lambda: StridedDocuments(8, 9), "--stride 9: give a number from 1 to the length of the rows, 8"),
    (lambda: Permuting(k=0), "permuting.k=0: must be at least 1"),
    (lambda: PackedSentences(32, global_tokens=-1), "^globals=-1: must be from 0 .none. to the row's length"),
    (lambda: SentenceGlobals(48, globals=49), "globals=49 with length=48: must be from 1 to 48"),
    (lambda: Masking(rate=0), "must be"),
    (lambda: Masking(mask=0.8, random=0.3), "must be"),
    (lambda: Masking(copies=-1), "objective.masking.copies=-1: must be from 0"),
    (
        lambda: Masking(unit="word_starts", ngrams=(-1.0, 2.0)),
        "masking.ngrams=.*: must be at least 0, not all 0",
    ),
    (lambda: Masking(unit="word_starts", ngrams=(float("nan"), 1.0)), "must be at least 0, not all 0"),
    (
        lambda: PackedSentences(32, Masking(unit="phrases")),
        "masking by unit='phrases': corpus .* has no field by token .*; use one of token, word_starts",
    ),
]
LACKING = [
    (SegmentPairs(32), "has no .*mask token"),
    (PackedDocuments(5), "no eod or sep token"),
    (PermutedSpans(512), "has no .*cls"),
]


@pytest.mark.parametrize(("make", "said"), ERRORS)
def test_what_cannot_be_is_said(corpus, make, said):
    with pytest.raises(UserError, match=said):
        make_examples(make(), corpus, "train", 4, seed=0).batch(0, ROWS)


@pytest.mark.parametrize(("layout", "said"), LACKING)
def test_a_tokenizer_without_the_tokens_of_a_layout_is_said(tmp_path, layout, said):
    corpus = Corpus(write_corpus(tmp_path / "c", numbered([[9]]), special={"unk": 1}))
    with pytest.raises(UserError, match=said):
        make_examples(layout, corpus, "train", 4, seed=0)


@pytest.fixture(scope="module")
def heldout(tmp_path_factory):
    path = tmp_path_factory.mktemp("heldout") / "c"
    return Corpus(write_corpus(path, [], heldout=random_documents(1, 40)))


def test_every_held_out_token_counts_once(heldout):
    examples = make_examples(PackedSentences(32), heldout, "heldout", 16, seed=0)
    batches = list(evaluation_batches(examples, limit=10**6))
    assert {batch["tokens"].shape for batch in batches} == {(16, 32)}
    texts = np.concatenate([unmasked(batch)[batch["segments"] > 0] for batch in batches])
    everything = heldout.parts[0].read("heldout", "tokens", np.array([0]), heldout.parts[0].lengths("heldout").sum())[0]
    assert sorted(texts[texts >= FIRST]) == sorted(everything)


@pytest.mark.parametrize("label", [NEXT_SENTENCE, SENTENCE_ORDER])
@pytest.mark.parametrize("limit", [1, 16, 21])
def test_the_limit_is_kept_and_the_last_batch_is_filled_with_rows_that_count_nowhere(heldout, limit, label):
    batches = list(
        evaluation_batches(make_examples(SegmentPairs(16, label=label), heldout, "heldout", 8, seed=0), limit)
    )
    assert len(batches) == -(-limit // 8)
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    assert (whole["segments"].any(axis=1) == (np.arange(len(whole["tokens"])) < limit)).all()
    assert (whole["prediction_weights"].any(axis=1) == (np.arange(len(whole["tokens"])) < limit)).all()
    assert (whole[label][limit:] == -1).all() and (whole[label][:limit] >= 0).any()


def test_rows_that_fill_up_hold_what_the_layout_says(heldout):
    (batch,) = evaluation_batches(make_examples(TwoWindows(10, 6), heldout, "heldout", 8, seed=0), limit=5)
    assert (batch["even"][5:] == -1).all() and set(batch["even"][:5].tolist()) == {0, 1}
    assert not batch["targets"][5:].any() and fits(batch, TwoWindows(10, 6))


def test_as_many_rows_are_built_together_as_all_their_tokens_allow(heldout):
    together = lambda layout: make_examples(layout, heldout, "heldout", 8, seed=0).together
    assert together(TwoWindows(64, 192)) == together(PackedSentences(256)) < together(PackedSentences(64))


def test_the_set_is_the_same_every_time_and_spread_over_the_split(heldout):
    examples = make_examples(SegmentPairs(16), heldout, "heldout", 8, seed=0)
    first, again = (list(evaluation_batches(examples, 40)) for _ in range(2))
    assert all(map(equal, first, again))
    assert all(equal(batch, examples.build(0, rows)) for batch, rows in zip(first, examples.fixed(40), strict=True))
    some = np.concatenate([unmasked(batch) for batch in first])
    everything = np.concatenate([unmasked(batch) for batch in evaluation_batches(examples, 10**6)])
    places = [np.flatnonzero((everything == row).all(axis=1))[0] for row in some]
    assert max(places) > 0.9 * examples.number and len(set(places)) == 40


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        corpus = written(Path(folder) / "c")
        for name, (layout, _) in LAYOUTS.items():
            print(f"{name}: {digest(layout, corpus)}")
