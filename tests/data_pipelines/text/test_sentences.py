"""Sentences are split where they end, steps do what their rules say, and both take linear time."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.document import Annotation, Document, Segment, plain
from data_pipelines.errors import UserError
from data_pipelines.text.sentences import WINDOW, check_language, starts
from data_pipelines.text.steps import STEPS, run


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
    wrong = {"de-DE": "de", "zh_Hans": "zh", "english": "en", "EN": "en", "german": None, "": None}
    for language, nearest in wrong.items():
        hint = f"the nearest is {nearest}" if nearest else "give a code such as en or zh"
        with pytest.raises(UserError, match=f"--language {language}: is not known; {hint}"):
            check_language(language)


@settings(max_examples=30)
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


CHINESE = ["control-characters", "tags", "empty-pairs"]


def text_after(names, text: str) -> str:
    return next(run(names, [plain(text)])).segments[0].text


def test_the_rules_for_wiki_text():
    text = "数学（ ）是《》一[（【】）]门<b class='x'>学科</b>。\x00\x07 1 < 2 and 3 > 2\tx\n"
    assert text_after(CHINESE, text) == "数学是一门学科。 1 < 2 and 3 > 2\tx\n"
    assert text_after(CHINESE, "one page\x0cNext\x0band\x85last\rold\r\nend") == "one page\nNext\nand\nlast\nold\nend"
    lines = '<doc id="13" title="数学">\n数学<br />\n</doc>\n'
    assert text_after(CHINESE, lines) == '<doc id="13" title="数学">\n数学\n</doc>\n'


def test_unicode_is_normalised():
    assert text_after(["nfc"], "e\u0301ﬁ") == "éﬁ"
    assert text_after(["nfkc"], "e\u0301ﬁ１") == "éfi1"


NAMES = st.lists(st.sampled_from(sorted(STEPS.keys() - {"short"})), max_size=3)
PARTS = st.sampled_from(["()", "（", "）", "<b>", "</b>", "\x00", "e\u0301", "ﬁ", "中", " ", "a"])
TEXT = st.lists(PARTS, min_size=1, max_size=12)


@settings(max_examples=30)
@given(NAMES, TEXT, TEXT, TEXT)
def test_an_annotation_keeps_its_characters(names, before, inside, after):
    before, inside, after = ("".join(part) for part in (before, inside, after))
    note = Annotation("label", 1, len(before), len(before + inside), "LOC")
    segments = (Segment("title", "()x"), Segment("text", before + inside + after))
    found = next(run(names, [Document(segments, (note,))]))
    assert [segment.text for segment in found.segments][0] == text_after(names, "()x")
    if expected := text_after(names, inside):
        (moved,) = found.annotations
        assert found.segments[1].text[moved.start : moved.end] == expected
        assert found.segments[1].text == text_after(names, before) + expected + text_after(names, after)
        assert moved._replace(start=0, end=0) == note._replace(start=0, end=0)
    else:
        assert not found.annotations


@pytest.mark.parametrize("unit", ["(", "<", "<!--", "( ", "<a ", "()", "\n<doc id", "(" * 50 + ")" * 50])
@pytest.mark.timeout(60)  # quadratic, a million characters take hours
def test_hostile_text_takes_linear_time(unit):
    text = unit * (1_000_000 // len(unit))
    assert len(text_after(CHINESE, text)) <= len(text)
