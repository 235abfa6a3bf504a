"""Streams of a corpus of parts: what a lane's rows read, and what is left where a window ends."""

from collections import Counter

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import DocumentStream
from data_pipelines.examples.layout import Piece
from data_pipelines.examples.permutations import PermutedSpans, Permuting
from data_pipelines.examples.streams import ContiguousStreams
from data_pipelines.order import Order
from tests.data_pipelines.corpora import SPECIAL, equal, numbered, write_corpus

EOD = 4
SHAPE = [[1 + (5 * document + 3 * sentence) % 17 for sentence in range(1 + document % 4)] for document in range(160)]
TOKENS = sum(map(sum, SHAPE))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "c"
    return Corpus(write_corpus(path, numbered(SHAPE), 9000, parts=7, special=SPECIAL | {"eod": EOD}))


def steps_of(examples, lane, epoch):
    """The steps of an epoch of a lane."""
    begins = [0]
    for number in range(epoch + 1):
        begins.append(begins[-1] + int(examples._steps(examples._windows(lane, number))[-1]))
    return range(begins[epoch], begins[epoch + 1])


@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (1, 3), (1, 7), (2, 2), (4, 1), (8, 2)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_token_comes_once_an_epoch_but_for_a_rest_of_each_window(corpus, lanes, window, epoch):
    rows, length = 2, 5
    examples = make_examples(ContiguousStreams(length), corpus, "train", rows * lanes, 3, Order(lanes, window))
    found, windows = Counter(), 0
    for lane in range(lanes):
        windows += len(examples._windows(lane, epoch))
        for step in steps_of(examples, lane, epoch):
            tokens = examples.batch(step, rows * lane + np.arange(rows))["tokens"]
            found.update(tokens[tokens != EOD].tolist())
    assert set(found.values()) == {1}
    assert 0 <= TOKENS - len(found) <= windows * (rows * length + 1)


def test_pieces_hold_their_stretch_of_the_part_s_stream_wherever_documents_are_cut(corpus):
    part, documents = corpus.parts[2], numbered(SHAPE)[160 * 2 // 7 : 160 * 3 // 7]
    whole = [token for text in documents for token in [*(token for one in text for token in one), EOD]]
    assert len(whole) == sum(part.sizes["train"][of] for of in ("tokens", "documents"))
    for begin, end in ((0, len(whole)), (3, 40), (len(whole) - 7, len(whole)), (11, 12), (0, 1), (5, len(whole) - 2)):
        stream = DocumentStream([Piece(part, begin, end)], "train", 0, 0, longest=4)
        tokens, _ = stream.read(np.array([0]), np.array([stream.total]))
        assert sorted(tokens.tolist()) == sorted(whole[begin:end])
        starts = stream.sentence_start(np.arange(stream.sentences))
        assert starts[0] == 0 and np.diff(starts, append=stream.total).max() <= 4 + 1  # with an end token


def test_rows_go_on_within_a_window_and_begin_anew_with_the_next(corpus):
    examples = make_examples(ContiguousStreams(5, reset=True), corpus, "train", 4, 3, Order(2, 2))
    steps = steps_of(examples, 1, 0)
    in_window = int(examples._steps(examples._windows(1, 0))[1])
    assert 3 < in_window < len(steps)
    batches = [examples.batch(step, np.array([2, 3])) for step in steps]
    for step, (one, other) in enumerate(zip(batches, batches[1:], strict=False)):
        assert np.array_equal(one["targets"][:, -1], other["tokens"][:, 0]) == (step + 1 != in_window), step
    # No document's number comes back in the next window, whose memory still holds the last one
    assert not set(batches[in_window - 1]["segments"].ravel()) & set(batches[in_window]["segments"].ravel())


def test_one_window_of_all_parts_is_one_stream_of_all_documents(tmp_path, corpus):
    whole = Corpus(write_corpus(tmp_path / "c", numbered(SHAPE), 9000, special=SPECIAL | {"eod": EOD}))
    for layout in (ContiguousStreams(16, reset=True), PermutedSpans(32, Permuting(reuse_len=8, perm_size=8))):
        one, other = (make_examples(layout, of, "train", 4, 3, Order(1, 7)) for of in (corpus, whole))
        for step in (0, 1, one.steps - 1, one.steps + 3):
            assert equal(one.batch(step, np.arange(4)), other.batch(step, np.arange(4)))


@pytest.mark.parametrize("both", [True, False])
def test_spans_are_permuted_in_every_lane(corpus, both):
    layout = PermutedSpans(40, Permuting(reuse_len=8, perm_size=8, bidirectional=both))
    examples = make_examples(layout, corpus, "train", 8, 3, Order(2, 3))
    reused = Counter()
    for lane in range(2):
        for step in steps_of(examples, lane, 0):
            batch = examples.batch(step, 4 * lane + np.arange(4))
            for row in batch["tokens"][batch["reversed"] == 0]:
                assert (row == SPECIAL["sep"]).sum() == 2 and row[-1] == SPECIAL["cls"]
                reused.update(row[:8][row[:8] != EOD].tolist())
    assert set(reused.values()) == {1} and len(reused) > 0.7 * TOKENS


def test_hosts_together_build_the_global_batch_and_any_step_alone(corpus):
    for layout in (ContiguousStreams(5, reset=True), PermutedSpans(32, Permuting(reuse_len=8, perm_size=8))):
        made = lambda: make_examples(layout, corpus, "train", 16, 3, Order(2, 2))  # noqa: B023
        for step in (0, 7, 40, 3):
            whole = made().batch(step, np.arange(32))
            for hosts in (1, 2, 4, 8):
                for rows in np.split(np.arange(16), hosts):
                    assert equal(made().batch(step, rows), {name: array[rows] for name, array in whole.items()})
            later = {name: array[16:] for name, array in whole.items()}
            assert equal(made().batch(step + 1, np.arange(16)), later)


def test_lanes_with_too_little_text_are_said(corpus):
    with pytest.raises(UserError, match="too few for a batch of 64 rows of 512 in 2 lanes: lower the batch size"):
        make_examples(ContiguousStreams(512), corpus, "train", 64, 3, Order(2)).check_size()
    with pytest.raises(UserError, match="3 rows are odd"):
        make_examples(PermutedSpans(512), corpus, "train", 6, 3, Order(2))
