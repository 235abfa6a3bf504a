"""The Kneser-Ney trigram of the benchmarks is a distribution, and the textbook's, counted in dictionaries."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from benchmarks.kneser_ney import fit, probabilities

VOCAB = 40
TOKENS = np.minimum(np.random.default_rng(0).zipf(1.5, 400), VOCAB - 2)  # the first and the last are never seen


def dictionary_probability(tokens, order, history, token):
    """By Chen & Goodman's equations, one after the other."""
    counts = Counter(tuple(tokens[at : at + order]) for at in range(len(tokens) - order + 1))
    result = [counts]
    while order > 1:
        before = defaultdict(set)
        for gram in counts:
            before[gram[1:]].add(gram[0])
        counts, order = Counter({gram: len(kinds) for gram, kinds in before.items()}), order - 1
        result.append(counts)

    def probability(level, history):
        if level == len(result):
            return 1 / VOCAB
        counts = result[level]
        values = list(counts.values())
        discount = values.count(1) / (values.count(1) + 2 * values.count(2))
        following = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == history}
        lower = probability(level + 1, history[1:])
        if not following:
            return lower
        kept = max(following.get(token, 0) - discount, 0)
        return (kept + discount * len(following) * lower) / sum(following.values())

    return probability(0, tuple(history))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_of_all_next_tokens_sum_to_one(order):
    orders = fit(TOKENS, order, VOCAB)
    for history in ([1, 1], [7, 1], [0, 1], [0, 0]):  # more and less of it seen
        rows = [probabilities(orders, np.array([*history, token])[-order:], VOCAB)[0] for token in range(VOCAB)]
        assert min(rows) > 0
        assert sum(rows) == pytest.approx(1, abs=1e-12)


def test_a_trigram_is_the_one_counted_in_dictionaries():
    text = np.random.default_rng(1).integers(0, VOCAB, 60)
    found = probabilities(fit(TOKENS, 3, VOCAB), text, VOCAB)
    train, text = TOKENS.tolist(), text.tolist()
    expected = [dictionary_probability(train, 3, text[at - 2 : at], text[at]) for at in range(2, len(text))]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
