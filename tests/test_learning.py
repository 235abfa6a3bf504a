"""The runs of `benchmarks.learning` and `benchmarks.text_to_text` can be trained, and what they are compared with,
Kneser-Ney's counts and copying, is what the textbook has, counted one by one."""

from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import text_to_text
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
def test_a_study_has_runs_of_recipes_that_take_its_options(study, tmp_path):
    chosen = STUDIES[study].runs
    options = Options(study, Path("texts"), only=tuple(chosen), seeds=(7,), steps=90)
    runs = trainings(STUDIES[study], options, tmp_path, Path("corpus"))
    assert [run.name for run in runs] == [*chosen] and len({run.workdir for run in runs}) == len(chosen)
    for run in runs:
        recipe, given = parse_run(run.arguments())
        assert (recipe.seed, recipe.steps, given.eval_every, recipe.model.dropout) == (7, 90, 10, 0)


def test_a_mixture_has_as_many_steps_of_each_task_as_the_task_alone(tmp_path):
    folders = {name: Path(name) for name in ("wikitext2", "sst2", "trec", "multi30k")}
    options = text_to_text.Options(**folders, steps=70, steps_of_tasks=30, mixture_seeds=(7,), folder=tmp_path)
    corpora = {name: Path(name) for name in ("text", "sentiment", "questions", "translation")}
    runs = {(run.name, run.seed): run for run in text_to_text.trainings(options, corpora)}
    parsed = {key: parse_run(run.arguments()) for key, run in runs.items()}
    steps = {key: recipe.steps for key, (recipe, _) in parsed.items()}
    alone = dict.fromkeys((("sentiment", 7), ("questions", 7), ("translation", 7)), 30)
    assert steps == {("mixture", 7): 120, ("text", 0): 70, ("text", 1): 70} | alone
    (phase,) = parsed["mixture", 7][0].phases
    assert [(task.name, task.corpus, task.rate) for task in phase.tasks] == [(name, name, 1.0) for name in corpora]
    for task in phase.tasks:
        key = task.name, 0 if task.name == "text" else 7
        assert task.objective == parsed[key][0].objective


def test_copying_guesses_by_the_input_and_by_frequencies():
    batch = {"tokens": np.array([[3, 3, 4, 0], [5, 6, 7, 8]]), "segments": np.array([[1, 1, 1, 0], [1, 1, 1, 1]])}
    batch |= {"targets": np.array([[3, 9], [0, 0]]), "weights": np.array([[1.0, 1.0], [0.0, 0.0]])}
    objective = SimpleNamespace(token_counts=lambda corpus, phase: np.zeros(10))
    given = SimpleNamespace(objective=objective, corpus=None, stage=SimpleNamespace(phase=None))
    given.batches = lambda: iter([batch])
    found = {rate: -np.log([rate * 2 / 3 + (1 - rate) / 10, (1 - rate) / 10]).mean() for rate in np.arange(20) / 20}
    assert 0 < min(found, key=found.get) < 0.95
    np.testing.assert_allclose(text_to_text.copying(given), min(found.values()))
