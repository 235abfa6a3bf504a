"""Permuted spans: rows laid out as XLNet's, orders that leak nothing, targets chosen as they should be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines import noise
from data_pipelines.batches import make_examples
from data_pipelines.examples.permutations import PermutedSpans, Permuting, _spans, predictions, visibility
from data_pipelines.order import permute
from tests.data_pipelines.corpora import SPECIAL, chosen, fits, numbered, of_streams, random_documents, whole_stream

SEP, CLS, EOD = SPECIAL["sep"], SPECIAL["cls"], 4999


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return of_streams(tmp_path_factory.mktemp("corpus"), random_documents(0, 60), random_documents(1, 20), eod=EOD)


def slowly(documents, order, room):
    """(tokens of the stream, places where A may end or B begin) of documents in an order."""
    tokens, cuts, longest = [], [], room - 2
    for index in order:
        for sentence in filter(None, documents[index]):
            piece = len(sentence) if len(sentence) <= longest else -(-longest // 2)
            cuts += range(len(tokens), len(tokens) + len(sentence), piece)
            tokens += sentence
        tokens.append(EOD)
    return tokens, {*cuts, len(tokens)}


def seen(batch):
    """bool [batch, length, length]: whether the query at i sees the key at j."""
    return batch["ranks"][:, None, :] < batch["thresholds"][:, :, None]


SHAPES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=9)


@settings(max_examples=50)
@given(shape=SHAPES, reuse=st.integers(0, 8), room=st.integers(9, 14), rows=st.integers(1, 2), both=st.booleans())
def test_rows_are_a_reused_part_a_and_b_with_separators(tmp_path_factory, shape, reuse, room, rows, both):
    shape = [document for document in shape if any(document)]
    documents = numbered(shape)
    corpus = of_streams(tmp_path_factory.mktemp("corpus"), documents, eod=EOD)
    batch_size = rows * (1 + both)
    permuting = Permuting(reuse_len=reuse, k=2, perm_size=4, bidirectional=both)
    examples = make_examples(PermutedSpans(reuse + room + 3, permuting), corpus, "train", batch_size, 0)
    for step in range(2 * examples.steps):
        epoch, place = divmod(step, examples.steps)
        order = permute(0, epoch, len(documents), np.arange(len(documents)))
        tokens, cuts = slowly(documents, order, room)
        batch = examples.batch(step, np.arange(batch_size))
        assert batch["reversed"].tolist() == [0] * rows + [1] * rows * both
        for number in range(batch_size):
            if both and number == rows:
                tokens, cuts = tokens[::-1], {len(tokens) - cut for cut in cuts}
            at = (number % rows * examples.steps + place) * (reuse or room)
            check_row(batch["tokens"][number].tolist(), batch["types"][number], tokens, cuts, at, reuse, room)


def check_row(row, types, tokens, cuts, at, reuse, room):
    separator = row.index(SEP)
    a, b = row[reuse:separator], row[separator + 1 : -2]
    assert row[:separator] == tokens[at : at + separator] and row[-2:] == [SEP, CLS]
    assert a and b and len(a) + len(b) == room and at + separator in cuts
    starts = [start for start in cuts if tokens[start : start + len(b)] == b]
    assert starts or b == tokens[at + separator : at + separator + len(b)]
    assert types.tolist() == [0] * (separator + 1) + [1] * (len(b) + 1) + [2]


def test_b_follows_half_of_the_time_and_a_takes_every_size(corpus):
    examples = make_examples(PermutedSpans(128, Permuting(reuse_len=32)), corpus, "train", 64, 0)
    follows, sizes = [], []
    for epoch in range(20):
        stream = whole_stream(corpus, "train", epoch)
        whole, _ = stream.read(np.array([0]), np.array([stream.total]))
        example = np.arange(examples.number)
        tokens = examples.build(epoch, example)["tokens"]
        for way, text in enumerate((whole, whole[::-1])):
            for piece, row in enumerate(np.array_split(tokens, 2)[way]):
                size = np.flatnonzero(row == SEP)[0]
                follows.append(np.array_equal(row[size + 1 : -2], text[piece * 32 :][size : len(row) - 3]))
                sizes.append(size - 32)
    assert abs(np.mean(follows) - 0.5) < 0.03
    assert min(sizes) < 10 and max(sizes) > 83 and abs(np.mean(sizes) - 46.5) < 4


@settings(max_examples=30)
@given(reuse=st.integers(0, 6), permuted=st.sets(st.integers(0, 9)), seed=st.integers(0, 99))
def test_any_order_and_choice_of_those_that_see_themselves_can_be_asked_for(reuse, permuted, seed):
    generator = np.random.default_rng(seed)
    permuted = np.array(sorted(permuted, key=lambda at: (at >= reuse, generator.random())), np.int64)
    predicted = generator.random(len(permuted)) < 0.5
    ranks, thresholds = visibility(np.arange(len(permuted))[None], permuted[None], predicted, reuse, length=10)
    sees = seen({"ranks": ranks, "thresholds": thresholds})[0]
    turn = {at: number for number, at in enumerate(permuted.tolist())}
    hidden = set(permuted[predicted].tolist())
    for i in range(10):
        for j in range(10):
            same = (i < reuse) == (j < reuse)
            earlier = j not in turn or (i in turn and turn[j] < turn[i]) or (i == j and i not in hidden)
            assert sees[i, j] == (earlier if same else j < reuse)


PERMUTING = st.builds(
    Permuting,
    reuse_len=st.integers(0, 40),
    k=st.integers(1, 8),
    spans=st.booleans(),
    perm_size=st.integers(1, 50),
    bidirectional=st.booleans(),
)


@settings(max_examples=30)
@given(permuting=PERMUTING, seed=st.integers(0, 9))
def test_no_order_leaks(corpus, permuting, seed):
    length, reuse, size = 64, permuting.reuse_len, permuting.perm_size
    batch = make_examples(PermutedSpans(length, permuting), corpus, "train", 4, seed).batch(0, np.arange(4))
    sees, target = seen(batch), chosen(batch)
    position = np.arange(length)
    special = (batch["types"] == 2) | (batch["tokens"] == SEP)
    first, last = position < reuse, position >= reuse
    assert not sees[:, first][:, :, last].any() and sees[:, last][:, :, first].all()
    block = np.where(first, position // size, (position - reuse) // size)
    alike = first[:, None] == first
    ordered = target | special
    for row in range(4):
        plain, moved = ~ordered[row], ordered[row]
        diagonal = sees[row].diagonal()
        assert not diagonal[target[row]].any() and diagonal[~target[row]].all()
        assert (sees[row] | ~alike)[:, plain].all() and not (sees[row] & alike)[plain][:, moved].any()
        pairs = alike & (position[:, None] != position) & moved[:, None] & moved
        assert (sees[row] ^ sees[row].T)[pairs].all()  # of two, one sees the other
        later = block[:, None] > block
        assert sees[row][pairs & later].all()  # only within a block is the order random


def test_every_order_within_a_block_is_as_likely(corpus):
    examples = make_examples(PermutedSpans(64, Permuting(reuse_len=32, perm_size=32)), corpus, "train", 8, 0)
    batch = [examples.build(epoch, np.arange(examples.number)) for epoch in range(8)]
    first = np.concatenate([np.take_along_axis(b["ranks"], b["prediction_positions"][:, :3], 1) for b in batch])
    counts = np.unique(np.argsort(first, axis=1), axis=0, return_counts=True)[1]
    assert len(counts) == 6 and counts.std() / counts.mean() < 0.1 and counts.sum() > 2000


@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.parametrize("reuse, k, length", [(256, 6, 512), (0, 6, 128), (32, 1, 64), (50, 3, 128)])
def test_exactly_so_many_positions_are_predicted_and_never_a_special_one(corpus, spans, reuse, k, length):
    permuting = Permuting(reuse_len=reuse, k=k, spans=spans, bidirectional=False)
    layout = PermutedSpans(length, permuting)
    batch = make_examples(layout, corpus, "train", 4, 0).batch(0, np.arange(4))
    assert fits(batch, layout)
    target, slots = chosen(batch), predictions(length, permuting)
    used = min(slots, length - 3)
    assert slots == -(-length // k)
    assert (target.sum(axis=1) == used).all() and (batch["prediction_weights"].sum(axis=1) == used).all()
    assert (target[:, :reuse].sum(axis=1) == -(-slots * reuse // length)).all()  # each part has its share
    assert not target[(batch["types"] == 2) | (batch["tokens"] == SEP)].any()
    positions = batch["prediction_positions"]
    assert (np.diff(positions[:, :used]) > 0).all() and not positions[:, used:].any()
    there = np.take_along_axis(batch["tokens"], positions, axis=1)
    assert np.array_equal(batch["prediction_targets"], there * (batch["prediction_weights"] > 0))


def test_spans_have_one_to_five_tokens_as_often_as_they_should_and_a_context_of_their_own():
    keys = noise.key(0, np.arange(50))
    mark = np.zeros((50, 20_000), np.int8)
    mark[_spans(6, keys, 0, 20_000, wanted=10**6)] = 1
    edges = np.diff(mark, axis=1, prepend=0, append=0)
    lengths = np.nonzero(edges == -1)[1] - np.nonzero(edges == 1)[1]
    shares = np.bincount(lengths, minlength=6)[1:] / len(lengths)
    assert len(shares) == 5 and shares == pytest.approx(1 / np.arange(1, 6) / (137 / 60), abs=0.005)
    assert mark.mean() == pytest.approx(1 / 7, abs=0.001)
    _, first = _spans(6, noise.key(0, np.arange(6000)), 0, 100, wanted=1)
    assert np.bincount(first) == pytest.approx([1000] * 6, abs=120)  # anywhere in its context, at the same rate
    row, place = _spans(6, noise.key(0, np.arange(20_000)), 0, 35, wanted=5)
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    whole = starts[np.bincount(row, minlength=20_000)[row[starts]] == 5]
    longest = place[whole][place[whole + 4] == place[whole] + 4]  # those of five tokens at once
    assert len(longest) > 1500 and abs(longest.mean() - 14.5) < 5 * 8.7 / np.sqrt(len(longest))
