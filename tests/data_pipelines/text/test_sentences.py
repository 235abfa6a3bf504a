"""Sentences: split where they end, never lost, in time linear in the text."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.errors import UserError
from data_pipelines.text.sentences import WINDOW, check_language, starts


def split(text: str, language: str = "en") -> list[str]:
    """The sentences, one space for each run of white space."""
    found = starts(text, language).tolist()
    return [" ".join(text[at:end].split()) for at, end in zip(found, [*found[1:], None], strict=True)]


def test_sentences_end_at_full_stops_and_blank_lines_but_not_at_newlines_or_abbreviations():
    text = "Dr. Smith came\nhome. He slept!\n  \nA heading\n\nThe end"
    assert split(text) == ["Dr. Smith came home.", "He slept!", "A heading", "The end"]


def test_the_language_decides():
    assert split("Am 3. Mai kam er. Ja.", "de") == ["Am 3. Mai kam er.", "Ja."]
    assert split("Am 3. Mai kam er. Ja.", "en") == ["Am 3.", "Mai kam er.", "Ja."]
    assert split("你好。今天天气很好！", "zh") == ["你好。", "今天天气很好！"]


def test_a_language_that_is_not_known_is_an_error_that_names_the_nearest():
    for language in ("en", "zh", "de", "no", "pt-br"):
        check_language(language)
    wrong = {"de-DE": "de", "zh_Hans": "zh", "english": "en", "EN": "en", "xx": ".*", "": ".*"}
    for language, nearest in wrong.items():
        with pytest.raises(UserError, match=f"--language {language}: not known; the nearest is {nearest};"):
            check_language(language)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["A word. ", "x", *" \n。\x0b", "\n\n", "Dr. ", "! ", "\r\n"]) | st.text(max_size=9)))
def test_sentences_begin_with_no_space_and_before_them_is_nothing_else(parts):
    text = "".join(parts)
    found = starts(text).tolist()
    assert found == sorted({*found})
    assert all(not text[at].isspace() for at in found)
    assert not text[: found[0] if found else None].strip()


def test_a_space_that_sentencex_panics_at_is_plain_and_counted():
    text, met = "One.\n\nB\u00a0. It helps", []
    assert starts(text, "en", lambda: met.append(1)).tolist() == starts(text.replace("\u00a0", " ")).tolist()
    assert met == [1]


@pytest.mark.parametrize("unit", ["word ", "word", "A sentence of words. ", "今天。"])
def test_a_long_paragraph_takes_time_linear_in_its_length(unit):
    text = unit * (20_000_000 // (1 if unit[:4] == "word" else 20) // len(unit))
    start = time.process_time()  # of this process alone, however busy the machine is
    found = starts(text)
    assert time.process_time() - start < 12  # a minute, where each window copies the rest
    assert np.diff(found).max() <= WINDOW
    if unit.strip()[-1] in ".。":
        assert set(np.diff(found)) == {len(unit)}
