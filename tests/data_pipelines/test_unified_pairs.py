"""Rows of UniLM's four tasks: how often each is drawn, its segments, and who sees whom."""

import numpy as np
import pytest
from scipy.stats import chisquare

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.unified_pairs import TASKS, UnifiedPairs, drawn
from tests.data_pipelines.corpora import SPECIAL, numbered, rows_of, unmasked, write_corpus

CLS, SEP, FIRST = SPECIAL["cls"], SPECIAL["sep"], 5


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Rows of a corpus in which every token is the one after the token before."""
    shape = [[7, 12, 4, 9, 15, 3] * 5] * 30
    path = write_corpus(tmp_path_factory.mktemp("corpus") / "c", numbered(shape), vocab_size=9000)
    return rows_of(UnifiedPairs(32), Corpus(path), 1)


def test_tasks_are_drawn_as_often_as_the_paper_says():
    counts = np.bincount(drawn(noise.bits(3, np.arange(60_000, dtype=np.uint32))), minlength=len(TASKS))
    assert chisquare(counts, 60_000 * np.array([1 / 3, 1 / 3, 1 / 6, 1 / 6])).pvalue > 1e-3


def test_rows_of_one_direction_are_one_text_and_the_others_a_text_and_what_follows_it(batch):
    found = []
    for tokens, types, segments in zip(unmasked(batch), batch["types"], batch["segments"], strict=True):
        tokens, types = tokens[: segments.sum()], types[: segments.sum()]
        assert tokens[0] == CLS and tokens[-1] == SEP and not batch["types"][batch["segments"] == 0].any()
        text, (*inner, _) = tokens[tokens >= FIRST], np.flatnonzero(tokens == SEP)
        assert (np.diff(text) == 1).all() or len(tokens) == 32  # a long row may have lost tokens between both
        found.append(types[0])
        if types[0] in (2, 3):
            assert not inner and (types == types[0]).all() and (np.diff(text) == 1).all()
        else:
            assert (types - types[0]).tolist() == [int(bool(inner) and at > inner[0]) for at in range(len(tokens))]
    assert {*found} == {0, 2, 3, 4}
    pairs = np.isin(found, [0, 4])
    assert (unmasked(batch)[pairs] == SEP).sum(1).mean() > 1.9


def test_a_token_sees_those_of_no_higher_rank(batch):
    for types, ranks, segments in zip(batch["types"], batch["ranks"], batch["segments"], strict=True):
        n, seen = segments.sum(), ranks <= ranks[:, None]
        lower, kind = np.tri(n, dtype=bool), types[0]
        both = lower | (types[:n] == 4)
        both[types[:n] == 4] = types[:n] == 4
        assert (seen[:n, :n] == {0: np.ones((n, n), bool), 2: lower, 3: lower.T, 4: both}[kind]).all()


def test_a_row_too_short_for_a_pair_is_an_error():
    with pytest.raises(UserError, match="length 4 leaves no room for text; use at least 5"):
        UnifiedPairs(4)
