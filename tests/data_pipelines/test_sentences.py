"""Sentences: split where they end, never lost, in time linear in the text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.sentences import WINDOW, split


def test_sentences_end_at_full_stops_and_blank_lines_but_not_at_newlines_or_abbreviations():
    text = "Dr. Smith came\nhome. He slept!\n  \nA heading\n\nThe end"
    assert split(text) == ["Dr. Smith came home.", "He slept!", "A heading", "The end"]


def test_the_language_decides():
    assert split("Am 3. Mai kam er. Ja.", "de") == ["Am 3. Mai kam er.", "Ja."]
    assert split("Am 3. Mai kam er. Ja.", "en") == ["Am 3.", "Mai kam er.", "Ja."]
    assert split("你好。今天天气很好！", "zh") == ["你好。", "今天天气很好！"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["A word. ", "x", *" \n。\x0b", "\n\n", "Dr. ", "! ", "\r\n"]) | st.text(max_size=9)))
def test_no_character_but_space_is_lost(parts):
    text = "".join(parts)
    found = split(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" and "\n" not in sentence for sentence in found)


@pytest.mark.parametrize("unit", ["word ", "word", "A sentence of words. "])
def test_a_long_paragraph_takes_time_linear_in_its_length(unit):
    text = unit * (400_000 // len(unit))
    start = time.perf_counter()
    found = split(text)
    assert time.perf_counter() - start < 5  # the library alone takes minutes
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert max(map(len, found)) <= WINDOW
    if unit.endswith(". "):
        assert set(found) == {unit.strip()}
