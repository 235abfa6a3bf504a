"""Streams are contiguous, hold every token once an epoch, and say where each document is; lanes have theirs."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.batches import evaluation_batches, make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import DocumentStream
from data_pipelines.examples.layout import Piece
from data_pipelines.examples.next_tokens import ContiguousStreams
from data_pipelines.examples.permutations import PermutedSpans, Permuting
from data_pipelines.order import Order, permute
from tests.data_pipelines.corpora import SPECIAL, equal, numbered, of_streams, random_documents, write_corpus

SEP, EOD = SPECIAL["sep"], 99
SHAPES = st.lists(st.lists(st.integers(0, 20), max_size=5), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return of_streams(tmp_path_factory.mktemp("corpus"), random_documents(0, 60), random_documents(1, 20))


def slowly(documents, order, end):
    """The documents one after the other, as (token, number of its document) for each token."""
    texts = [[token for sentence in document for token in sentence] for document in documents]
    texts = [text for text in texts if text]
    return [(token, number) for number, index in enumerate(order) for token in [*texts[index], end]]


def joined(examples, steps, name="tokens"):
    """What each row of the batch holds over some steps, one after the other: [batch_size, steps * length]."""
    rows = np.arange(examples.batch_size)
    return np.concatenate([examples.batch(step, rows)[name] for step in steps], axis=1)


@settings(max_examples=30)
@given(shape=SHAPES, length=st.integers(1, 9), rows=st.integers(1, 3), reset=st.booleans(), seed=st.integers(0, 1))
def test_an_epoch_is_its_documents_in_its_order_cut_in_equal_runs(tmp_path_factory, shape, length, rows, reset, seed):
    documents = numbered([document for document in shape if any(document)])  # `prepare` stores no others
    corpus = of_streams(tmp_path_factory.mktemp("corpus"), documents)
    examples = make_examples(ContiguousStreams(length, reset), corpus, "train", rows, seed)
    for epoch in range(2 * (examples.steps > 0)):
        order = permute(seed, epoch, len(documents), np.arange(len(documents)))
        stream = np.array(slowly(documents, order, EOD)).reshape(-1, 2)
        covered = rows * examples.steps * length
        assert len(stream) - 1 - rows * length < covered < len(stream)
        steps = range(epoch * examples.steps, (epoch + 1) * examples.steps)
        assert joined(examples, steps).ravel().tolist() == stream[:covered, 0].tolist()
        assert joined(examples, steps, "targets").ravel().tolist() == stream[1 : covered + 1, 0].tolist()
        numbers = 1 + epoch * len(order) + stream[:covered, 1] if reset else np.ones(covered)
        assert joined(examples, steps, "segments").ravel().tolist() == numbers.tolist()
        assert (joined(examples, steps, "weights") == 1).all()


def test_a_document_has_another_number_in_the_next_epoch_whose_memory_may_still_hold_it(tmp_path):
    examples = make_examples(
        ContiguousStreams(15, reset=True), of_streams(tmp_path, numbered([[60]])), "train", 2, seed=0
    )
    assert joined(examples, range(4), "segments").tolist() == [[1] * 30 + [2] * 30] * 2


def test_numbers_of_documents_stay_within_32_bits(corpus):
    examples = make_examples(ContiguousStreams(32, reset=True), corpus, "train", 4, seed=0)
    segments = examples.build(10**9, np.arange(examples.number))["segments"]
    assert segments.dtype == np.int32 and segments.min() >= 0 and (segments[:-1] > 0).all()


def test_a_stream_longer_than_32_bits_can_count():
    class Huge:  # nine documents of a thousand million tokens, of which each is its place modulo 997
        special, offsets = {"sep": 998}, np.arange(10) * 10**9
        sentences, documents = (lambda self, split: self.offsets), (lambda self, split: np.arange(10))
        sizes = {"train": {"documents": 9, "tokens": 9 * 10**9}}
        corpus = property(lambda self: self)
        parts = property(lambda self: (self,))

        def read(self, split, field, starts, length):
            return (starts[:, None] + np.arange(length)) % 997

    examples = make_examples(ContiguousStreams(512, reset=True), Huge(), "train", 64, seed=0)
    batch = examples.batch(examples.steps - 1, np.arange(64))
    order = permute(0, 0, 9, np.arange(9))
    place = (np.arange(64)[:, None] + 1) * examples.steps * 512 - 512 + np.arange(512)
    number, offset = np.divmod(place, 10**9 + 1)
    assert place.max() > 2**33 and np.array_equal(batch["segments"], 1 + number)
    expected = np.where(offset == 10**9, 998, (order[number] * 10**9 + offset) % 997)
    assert np.array_equal(batch["tokens"], expected)


@pytest.mark.parametrize(
    "length, batch_size, limit", [(16, 8, 10**6), (16, 8, 20), (7, 3, 50), (500, 64, 10), (9, 4, 1)]
)
def test_evaluation_is_contiguous_and_every_target_of_its_stretch_counts_once(corpus, length, batch_size, limit):
    examples = make_examples(ContiguousStreams(length, reset=True), corpus, "heldout", batch_size, seed=0)
    batches = list(evaluation_batches(examples, limit))
    assert {batch["tokens"].shape for batch in batches} == {(batch_size, length)}
    order = permute(0, 0, 20, np.arange(20))
    stream = np.array(slowly(random_documents(1, 20), order, EOD))
    covered = min(limit * length, len(stream) - 1)
    whole = {name: np.concatenate([batch[name] for batch in batches], axis=1) for name in examples.spec}
    real = whole["weights"] > 0
    assert np.array_equal(whole["segments"] > 0, real) and not whole["tokens"][~real].any()
    assert whole["tokens"][real].tolist() == stream[:covered, 0].tolist()
    assert whole["targets"][real].tolist() == stream[1 : covered + 1, 0].tolist()
    assert (real[:, :-1] >= real[:, 1:]).all()  # no row goes on after it has ended


def test_too_little_text_is_an_error_and_none_to_evaluate_on_is_none(tmp_path):
    few = of_streams(tmp_path, numbered([[9], [9]]))
    of = lambda length, rows, split: make_examples(ContiguousStreams(length), few, split, rows, seed=0)
    assert of(19, 1, "train").batch(0, np.arange(1))["tokens"].shape == (1, 19)
    with pytest.raises(UserError, match="20 tokens, too few for a batch of 4 rows of 5: lower the batch size"):
        of(5, 4, "train").batch(0, np.arange(4))
    with pytest.raises(UserError, match="split 'heldout' .* has 0 tokens"):
        of(5, 4, "heldout").batch(0, np.arange(4))
    assert list(evaluation_batches(of(5, 4, "heldout"), 100)) == []


END = 4
SHAPE = [[1 + (5 * document + 3 * sentence) % 17 for sentence in range(1 + document % 4)] for document in range(160)]
TOKENS = sum(map(sum, SHAPE))


@pytest.fixture(scope="module")
def of_parts(tmp_path_factory):
    path = tmp_path_factory.mktemp("of_parts") / "c"
    return Corpus(write_corpus(path, numbered(SHAPE), 9000, parts=7, special=SPECIAL | {"eod": END}))


def steps_of(examples, lane, epoch):
    """The steps of an epoch of a lane."""
    begins = [0]
    for number in range(epoch + 1):
        begins.append(begins[-1] + int(examples._begins(lane, number)[-1]))
    return range(begins[epoch], begins[epoch + 1])


@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (1, 3), (1, 7), (2, 2), (4, 1), (8, 2)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_token_comes_once_an_epoch_but_for_a_rest_of_each_window(of_parts, lanes, window, epoch):
    rows, length = 2, 5
    examples = make_examples(ContiguousStreams(length), of_parts, "train", rows * lanes, 3, Order(lanes, window))
    found, windows = Counter(), 0
    for lane in range(lanes):
        windows += len(examples._windows(lane, epoch))
        for step in steps_of(examples, lane, epoch):
            tokens = examples.batch(step, rows * lane + np.arange(rows))["tokens"]
            found.update(tokens[tokens != END].tolist())
    assert set(found.values()) == {1}
    assert 0 <= TOKENS - len(found) <= windows * (rows * length + 1)


def test_pieces_hold_their_stretch_of_the_part_s_stream_wherever_documents_are_cut(of_parts):
    part, documents = of_parts.parts[2], numbered(SHAPE)[160 * 2 // 7 : 160 * 3 // 7]
    whole = [token for text in documents for token in [*(token for one in text for token in one), END]]
    assert len(whole) == sum(part.sizes["train"][of] for of in ("tokens", "documents"))
    for begin, end in ((0, len(whole)), (3, 40), (len(whole) - 7, len(whole)), (11, 12), (0, 1), (5, len(whole) - 2)):
        stream = DocumentStream([Piece(part, begin, end)], "train", 0, 0, longest=4)
        tokens, _ = stream.read(np.array([0]), np.array([stream.total]))
        assert sorted(tokens.tolist()) == sorted(whole[begin:end])
        starts = stream.sentences[:-1]
        assert starts[0] == 0 and np.diff(starts, append=stream.total).max() <= 4 + 1  # with an end token


def test_rows_go_on_within_a_window_and_begin_anew_with_the_next(of_parts):
    examples = make_examples(ContiguousStreams(5, reset=True), of_parts, "train", 4, 3, Order(2, 2))
    steps = steps_of(examples, 1, 0)
    in_window = int(examples._begins(1, 0)[1])
    assert 3 < in_window < len(steps)
    batches = [examples.batch(step, np.array([2, 3])) for step in steps]
    for step, (one, other) in enumerate(zip(batches, batches[1:], strict=False)):
        assert np.array_equal(one["targets"][:, -1], other["tokens"][:, 0]) == (step + 1 != in_window), step
    # No document's number comes back in the next window, whose memory still holds the last one
    assert not set(batches[in_window - 1]["segments"].ravel()) & set(batches[in_window]["segments"].ravel())


def test_one_window_of_all_parts_is_one_stream_of_all_documents(tmp_path, of_parts):
    whole = Corpus(write_corpus(tmp_path / "c", numbered(SHAPE), 9000, special=SPECIAL | {"eod": END}))
    for layout in (ContiguousStreams(16, reset=True), PermutedSpans(32, Permuting(reuse_len=8, perm_size=8))):
        one, other = (make_examples(layout, of, "train", 4, 3, Order(1, 7)) for of in (of_parts, whole))
        for step in (0, 1, one.steps - 1, one.steps + 3):
            assert equal(one.batch(step, np.arange(4)), other.batch(step, np.arange(4)))


def test_hosts_together_build_the_global_batch_and_any_step_alone(of_parts):
    for layout in (ContiguousStreams(5, reset=True), PermutedSpans(32, Permuting(reuse_len=8, perm_size=8))):
        made = lambda: make_examples(layout, of_parts, "train", 16, 3, Order(2, 2))  # noqa: B023
        for step in (0, 7, 40, 3):
            whole = made().batch(step, np.arange(32))
            for hosts in (1, 2, 4, 8):
                for rows in np.split(np.arange(16), hosts):
                    assert equal(made().batch(step, rows), {name: array[rows] for name, array in whole.items()})
            later = {name: array[16:] for name, array in whole.items()}
            assert equal(made().batch(step + 1, np.arange(16)), later)


def test_an_odd_number_of_rows_of_a_lane_is_said(of_parts):
    with pytest.raises(UserError, match="3 rows in a lane are not a multiple of 2"):
        make_examples(PermutedSpans(512), of_parts, "train", 6, 3, Order(2))
