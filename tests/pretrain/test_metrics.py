"""Texts are compared with their targets as the papers and libraries that the figures are named after do."""

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

from pretrain import metrics

WRITTEN = ["The cat sat on the mat, today.", "a dog barks at 3 o'clock", "nothing like it"]
TARGETS = [("The cat sat on a mat.",), ("The dog barked at 3 o'clock!", "a dog barks at three"), ("", "other words")]


def test_figures_are_those_of_the_libraries_with_texts_of_different_numbers_of_targets():
    found, signature = metrics.figures(WRITTEN, TARGETS)
    streams = [[of[0] for of in TARGETS], [of[1] if len(of) > 1 else None for of in TARGETS]]
    libraries = {"BLEU": BLEU(), "chrF": CHRF()}
    expected = {name: metric.corpus_score(WRITTEN, streams).score for name, metric in libraries.items()}
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for kind, name in {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}.items():
        pairs = zip(WRITTEN, TARGETS, strict=True)
        best = [max(scorer.score(one, text)[kind].fmeasure for one in of) for text, of in pairs]
        expected[name] = 100 * sum(best) / 3
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert 0 < found["ROUGE-2"] < found["ROUGE-L"] <= found["ROUGE-1"] < 100 and 10 < found["BLEU"] < 90
    assert [*found] == [*expected, "exact_match", "F1"]
    assert signature.startswith("nrefs:var|") and "tok:13a" in signature


def test_answers_are_compared_as_squad_s_program_does():
    """Without case, articles, punctuation and white space; of several targets with the nearest."""
    assert metrics.exact_match(["The  Eiffel-Tower!", "Paris"], [("eiffeltower",), ("in Paris", "a paris.")]) == 100
    assert metrics.exact_match(["Paris", "theatre"], [("paris",), ("atre",)]) == 50
    assert metrics.f1(["The cat and the dog"], [("dog and dog",)]) == pytest.approx(100 * 2 / 3)  # 2 of 3 and of 3
    assert metrics.f1(["b b c", "x"], [("b d", "b c"), ("y",)]) == pytest.approx(100 * (0.8 + 0) / 2)
    assert metrics.f1(["b b c"], [("b b",)]) == 80  # as often as in both
    assert metrics.f1(["", "the.", "a", "b"], [("",), ("!",), ("b",), ("",)]) == 50  # nothing is nothing


def test_texts_without_spaces_are_compared_by_characters_and_others_by_words():
    assert metrics.words("Straße_42: हिन्दी, 北京は、한국") == ["straße", "42", "हिन्दी", "北", "京", "は", "한국"]
    assert metrics.normalised("The北京は、x y。") == ["the", "北", "京", "は", "x", "y"]
    expected = {"ROUGE-1": 75, "ROUGE-2": 200 / 3, "ROUGE-L": 75}
    assert metrics.rouge(["北京很大"], [("北京很小",)]) == pytest.approx(expected)
    assert metrics.f1(["北京很大。"], [("北京 很小",)]) == 75
    chinese = "北京是中国的首都，人口很多。"
    assert metrics.bleu([chinese], [(chinese[:-3] + "少。",)], "zh")[0] > 50
    assert metrics.bleu([chinese], [(chinese[:-3] + "少。",)])[0] < 1  # one word


def test_nothing_that_was_written_is_worth_nothing():
    found, _ = metrics.figures(["", ""], [("d",), ("b c",)])
    assert set(found.values()) == {0}
