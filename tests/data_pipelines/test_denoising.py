"""Noises on texts: each is undone, has the distribution that it should have, and leaves the frame alone."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.denoising import Denoising, Noises, poisson
from data_pipelines.examples.text_to_text import END, Pairs
from tests.data_pipelines.corpora import SPECIAL, equal, fits, numbered, rows_of, write_corpus
from tests.data_pipelines.prepared import command

CLS, SEP, MASK = (SPECIAL[role] for role in ("cls", "sep", "mask"))
NONE = {"permute": 0.0, "infill": 0.0}


def written(folder, shape, special=SPECIAL, **more):
    return Corpus(write_corpus(folder / "c", numbered(shape), 9000, special=special, **more))


def texts(batch, opening=(CLS,)):
    """(input, target) of each row without the frame, which must be there."""
    found = []
    for row in zip(*(batch[name] for name in ("tokens", "segments", "targets", "decoder_segments")), strict=True):
        sides = [tokens[segments > 0].tolist() for tokens, segments in (row[:2], row[2:])]
        assert all(side[: len(opening)] == [*opening] and side[-1] == SEP for side in sides)
        found.append([side[len(opening) : -1] for side in sides])
    return found


def one(corpus, length, noises, epoch=0):
    batch = rows_of(Denoising(length, length, noises, start=END), corpus, number=epoch)
    return texts(batch)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 100 tokens, in sentences of 20, 30 and 50."""
    return written(tmp_path_factory.mktemp("c"), [[20, 30, 50]] * 80)


@settings(max_examples=15)
@given(
    shape=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=3, max_size=9),
    length=st.integers(4, 40),
    shares=st.tuples(*[st.sampled_from([0.0, 0.2, 1.0])] * 3, *[st.sampled_from([0.0, 0.3, 0.5])] * 3),
    span=st.floats(1, 8),
    parts=st.sampled_from([1, 3]),
)
def test_targets_are_the_texts_and_inputs_have_their_tokens(tmp_path_factory, shape, length, shares, span, parts):
    corpus = written(tmp_path_factory.mktemp("c"), [*shape, [1, 1]], parts=parts)
    permute, rotate, random, infill, mask, delete = shares
    noises = {"permute": permute, "rotate": rotate, "infill": infill, "mask": mask, "delete": delete}
    if infill + mask + delete > 1 or not any(noises.values()):
        return
    noises |= {"span": span} if infill else {}
    layout = Denoising(length, length, Noises(**noises, random=random * bool(infill or mask)), start=END)
    batch = rows_of(layout, corpus)
    assert fits(batch, layout) and equal(batch, rows_of(layout, corpus))
    assert (batch["decoder_tokens"][:, :2] == (SEP, CLS)).all()
    assert (batch["weights"] == batch["decoder_segments"]).all()
    assert (batch["decoder_tokens"][:, 2:] == batch["targets"][:, 1:-1]).all()
    ends, seen = set(np.cumsum([sum(document) for document in shape]) + 5), []
    for noised, text in texts(batch):
        assert text == [*range(text[0], text[0] + len(text))] and 1 <= len(noised) <= length - 2
        assert not ends & {*text[1:]}  # a row is of one document
        if not noises["infill"]:
            assert len(noised) <= len(text)
        if not random:
            kept = [token for token in noised if token != MASK]
            assert len(kept) == len({*kept}) and {*kept} <= {*text}
        seen += text
    assert sorted(seen) == [*range(5, 5 + sum(map(sum, shape)) + 2)]


def test_rows_have_whole_sentences_of_a_document(tmp_path):
    corpus = written(tmp_path, [[5, 4, 3, 1], [25, 2], [1]])
    sizes = [len(text) for _, text in one(corpus, 12, Noises())]
    assert sizes == [9, 4, 10, 10, 7, 1]  # 5 + 4, 3 + 1; 25 cut, with the sentence after it; a short document


def test_masking_replaces_tokens_in_place_and_few_by_random_ones(corpus):
    rows = one(corpus, 102, Noises(**NONE, mask=0.3, random=0.2))
    changed = [(new, old) for noised, text in rows for new, old in zip(noised, text, strict=True) if new != old]
    assert len(changed) == pytest.approx(80 * 30, abs=3)  # of random tokens few are the right ones
    drawn = np.array([new for new, _ in changed if new != MASK])
    assert stats.binomtest(len(drawn), 80 * 30, 0.2).pvalue > 1e-3
    assert drawn.min() >= 5 and stats.kstest(drawn, stats.uniform(5, 9000 - 5).cdf).pvalue > 1e-3
    places = np.array([at for noised, text in rows for at in range(100) if noised[at] != text[at]])
    assert stats.chisquare(np.bincount(places, minlength=100)).pvalue > 1e-3


def test_deletion_leaves_the_other_tokens_in_order(corpus, tmp_path):
    rows = one(corpus, 102, Noises(**NONE, delete=0.3))
    assert all(len(noised) == 70 and sorted({*noised}) == noised and {*noised} <= {*text} for noised, text in rows)
    gone = np.array([token % 100 for noised, text in rows for token in {*text} - {*noised}])
    assert stats.chisquare(np.bincount(gone, minlength=100)).pvalue > 1e-3
    assert one(written(tmp_path, [[1]]), 5, Noises(**NONE, delete=0.9)) == [[[5], [5]]]  # one token stays


def gaps(noised, text):
    """[masks, hidden tokens] between each two tokens of the text that stayed, and at both ends: int64 [gaps, 2]."""
    tokens = np.array([text[0] - 1, *noised, text[-1] + 1])
    kept = np.flatnonzero(np.array([0, *noised, 0]) != MASK)
    return np.stack([np.diff(kept), np.diff(tokens[kept])], axis=1) - 1


def infilled(text, hidden, random):
    """A text with spans of `hidden` tokens in all masked, in a plain way."""
    lengths = []
    while sum(lengths) < hidden:
        lengths.append(min(random.poisson(3.0), hidden - sum(lengths)))
    steps = random.permutation([*([1] * (len(text) - hidden)), *(-length for length in lengths)])
    begins = np.cumsum(np.abs(steps)) - np.abs(steps)
    return [text[begin] if step == 1 else MASK for begin, step in zip(begins, steps, strict=True)]


def test_spans_have_poisson_distributed_lengths_and_any_place(corpus):
    random = np.random.default_rng(0)
    draws = random.integers(0, 2**32, 10**5, dtype=np.uint32)
    for mean in (1.0, 3.0, 40.0):
        assert stats.chisquare(*binned(poisson(mean, draws), mean)).pvalue > 1e-3
    lengths, found, expected = ([], []), np.zeros(10), np.zeros(10)
    for noised, text in (row for epoch in range(20) for row in one(corpus, 102, Noises(permute=0.0), epoch)):
        for of, tokens in zip(lengths, (noised, infilled(text, 30, random)), strict=True):
            masks, hidden = gaps(tokens, text).T
            assert hidden.sum() == 30 and (hidden >= 0).all() and not hidden[masks == 0].any()
            of += hidden[masks == 1].tolist()  # of adjacent spans only the sum is seen
        tenths = np.arange(len(noised)) * 10 // len(noised)
        found += np.bincount(tenths[np.equal(noised, MASK)], minlength=10)
        expected += np.bincount(tenths) * noised.count(MASK) / len(noised)
    table = [np.bincount(np.minimum(of, 8), minlength=9) for of in lengths]
    assert stats.chi2_contingency(table).pvalue > 1e-3 and np.min(table) > 20
    assert stats.chisquare(found, expected).pvalue > 1e-3


def binned(numbers, mean):
    """(how often each number was drawn, how often it should have been), rare ones together."""
    low, high = (int(stats.poisson.ppf(share, mean)) for share in (2e-3, 1 - 2e-3))
    found = np.bincount(np.clip(numbers, low, high))[low:]
    expected = stats.poisson.pmf(np.arange(low, high + 1), mean)
    expected[0], expected[-1] = stats.poisson.cdf(low, mean), stats.poisson.sf(high - 1, mean)
    return found, expected * len(numbers)


def test_empty_spans_fit_into_the_row(tmp_path):
    corpus = written(tmp_path, [[6]] * 400)
    sizes = {length: [len(noised) for noised, _ in one(corpus, length, Noises(0.0, 0.3, 1.0))] for length in (8, 20)}
    assert max(sizes[8]) == 6 and max(sizes[20]) == 8  # two tokens to hide: at most two spans


def test_sentences_come_in_any_order(corpus):
    rows = [row for epoch in range(8) for row in one(corpus, 102, Noises(1.0, 0.0), epoch)]
    orders = []
    for noised, text in rows:
        begins = text[0] + np.array([0, 20, 50])
        sentences = {first: [*range(first, first + size)] for first, size in zip(begins, (20, 30, 50), strict=True)}
        order = sorted(begins, key=noised.index)
        assert noised == sum((sentences[first] for first in order), [])
        orders.append(tuple(np.argsort(order)))
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6 and stats.chisquare(counts).pvalue > 1e-3
    rows = [row for epoch in range(8) for row in one(corpus, 102, Noises(0.5, 0.0), epoch)]
    assert stats.binomtest(sum(noised == text for noised, text in rows), len(rows), 0.5 + 0.5 / 6).pvalue > 1e-3


def test_rotation_begins_at_any_token(corpus):
    rows = [row for epoch in range(8) for row in one(corpus, 102, Noises(**NONE, rotate=0.75), epoch)]
    first = np.array([text.index(noised[0]) for noised, text in rows])
    assert all(noised == text[at:] + text[:at] for at, (noised, text) in zip(first, rows, strict=True))
    expected = np.full(100, 0.75 / 100)
    expected[0] += 0.25
    assert stats.chisquare(np.bincount(first, minlength=100), expected * len(rows)).pvalue > 1e-3


def test_another_epoch_has_other_noise(corpus):
    assert one(corpus, 102, Noises()) != one(corpus, 102, Noises(), epoch=1)


def test_frames_are_those_of_the_vocabulary(tmp_path):
    special = {role: token for role, token in SPECIAL.items() if role != "cls"}
    corpus = written(tmp_path, [[4, 4]], special)
    for start, first in (("pad", SPECIAL["pad"]), (END, SEP)):
        batch = rows_of(Denoising(12, 12, Noises(), start=start), corpus)
        assert batch["decoder_tokens"][:, 0] == [first] and texts(batch, ())[0][1] == [*range(5, 13)]
    lines = [{"input": "abcdef", "target": "x"}, {"input": "a", "target": "uvwxyz"}]
    sides = ["--tokenizer", "bytes", "--heldout", "0", "--field", "input", "--field", "target", "--code", "Task"]
    assert command(tmp_path / "pairs", *sides, lines=lines) == 0
    pairs = Corpus(tmp_path / "pairs")
    pairs.special["cls"] = 7
    code, end, ids = pairs.special["code_Task"], pairs.special["sep"], lambda text: [byte + 3 for byte in text.encode()]
    batch = rows_of(Pairs(7, 5, start=END), pairs)
    rows = {tuple(map(int, row)) for row in batch["tokens"]}
    assert rows == {(7, code, *ids("abcd"), end), (7, code, *ids("a"), end, 0, 0, 0)}
    rows = {tuple(map(int, row)) for row in np.hstack([batch["decoder_tokens"], batch["targets"]])}
    assert rows == {(end, 7, *ids("x"), end, 0, 7, *ids("x"), end, 0, 0), (end, 7, *ids("uvw"), 7, *ids("uvw"), end)}
    with pytest.raises(UserError, match="target_length=2: no room for text; use at least 3"):
        Pairs(7, 2, start=END)


def test_the_examples_of_the_page_are_rows(tmp_path):
    page = (Path(__file__).parents[2] / "docs/how-to/text-to-text.md").read_text()
    examples = re.findall(r"\| `\.(\w+) ([\d.]+)` \|.*\| `(.*)` \|", page)
    assert [name for name, *_ in examples] == ["permute", "infill", "mask", "delete", "rotate"]
    corpus = written(tmp_path, [[4, 3]] * 1000)
    spelled = lambda noised, text: " ".join("_" if one == MASK else "ABC.DE."[one - text[0]] for one in noised)
    for name, share, becomes in examples:
        assert becomes in {spelled(*row) for row in one(corpus, 9, Noises(**NONE | {name: float(share)}))}


@pytest.mark.parametrize(
    ("noises", "said"),
    [
        ({"infill": 1.5}, "objective.noises.infill=1.5: must be from 0 to 1"),
        ({"span": 0.5}, "objective.noises.span=0.5: must be from 1 to 1000"),
        ({"delete": 1.0, "infill": 0.0}, "objective.noises.delete=1.0: leaves no input"),
        ({"mask": 0.5, "delete": 0.4}, "infill \\+ mask \\+ delete is 1.2, above 1"),
        ({"permute": 0.0, "infill": 0.0}, "objective.noises: all are 0"),
        ({"infill": 0.0, "random": 0.1}, "objective.noises.random=0.1: has no effect without infill or mask"),
        ({"infill": 0.0, "span": 3.5}, "objective.noises.span=3.5: has no effect without infill"),
    ],
)
def test_noises_that_cannot_be_are_refused(noises, said):
    with pytest.raises(UserError, match=said):
        Noises(**noises)


def test_what_noises_need_is_asked_for(tmp_path):
    bare = {role: token for role, token in SPECIAL.items() if role != "mask"}
    examples = lambda corpus, noises: make_examples(Denoising(9, 9, noises), corpus, "train", 1, seed=0)
    for noises in (Noises(), Noises(**NONE, mask=0.1)):
        with pytest.raises(UserError, match="has no mask token, which these rows need"):
            examples(written(tmp_path / noises.__repr__(), [[4, 4]], bare), noises)
    single = written(tmp_path, [[4], [5]])
    with pytest.raises(UserError, match="permute=1.0: each document of corpus .* is one sentence"):
        examples(single, Noises())
    examples(single, Noises(permute=0.0))
    with pytest.raises(UserError, match="target_length=8: must be that of inputs; set it to 9"):
        Denoising(9, 8)
