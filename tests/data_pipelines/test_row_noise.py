"""Every layout's rows have noise of their own, by seed, epoch and example, and draw no number of it twice."""

import numpy as np
import pytest

from data_pipelines import noise
from data_pipelines.batches import make_examples
from tests.data_pipelines.layouts import LAYOUTS, written

ROWS = np.array([5, 0, 3])
NOISY = [name for name in LAYOUTS if not name.startswith(("documents", "stream"))]  # these draw nothing


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return written(tmp_path_factory.mktemp("corpus") / "c")


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
def test_keys_are_of_the_seed_the_epoch_and_the_example(name, corpus, drawn):
    found = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        drawn.clear()
        make_examples(LAYOUTS[name], corpus, "train", 8, seed).build(epoch, ROWS)
        keys = drawn[0][0]
        assert all(np.array_equal(keys, others) for others, _ in drawn)
        found += keys.tolist()
    assert len(set(found)) == 3 * len(ROWS)


@pytest.mark.parametrize("name", NOISY)
def test_no_two_uses_share_a_number(name, corpus, drawn):
    make_examples(LAYOUTS[name], corpus, "train", 8, 7).build(1, ROWS)
    for row in range(len(ROWS)):
        uses = [set(counters[row].tolist()) for _, counters in drawn]  # in one use, a word's tokens share theirs
        assert len(uses) >= 2 and sum(map(len, uses)) == len(set.union(*uses))
