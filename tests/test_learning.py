"""The runs of `benchmarks.learning` can be trained, and its Kneser-Ney is the textbook's, counted in dictionaries."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kneser_ney import fit, probabilities
from benchmarks.learning import STUDIES, Options, trainings
from pretrain.commands.run import parse_run

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
def test_probabilities_are_those_counted_in_dictionaries(order):
    text = np.random.default_rng(1).integers(0, VOCAB, 60)  # also after what is never seen
    found = probabilities(fit(TOKENS, order, VOCAB), text, VOCAB)
    train, text = TOKENS.tolist(), text.tolist()
    places = range(order - 1, len(text))
    expected = [dictionary_probability(train, order, text[at - order + 1 : at], text[at]) for at in places]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_has_runs_of_recipes_that_take_its_options(study):
    chosen = STUDIES[study].runs
    options = Options(study, Path("texts"), only=tuple(chosen), seeds=(7,), steps=90)
    runs = trainings(STUDIES[study], options, Path("runs"))
    assert [run.name for run in runs] == [*chosen] and len({run.workdir for run in runs}) == len(chosen)
    for run in runs:
        recipe, given = parse_run(run.arguments(Path("corpus")))
        assert (recipe.seed, recipe.steps, given.eval_every, recipe.model.dropout) == (7, 90, 10, 0)
