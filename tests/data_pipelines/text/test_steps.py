"""Steps: what the rules say happens to texts, and annotations stay on their characters."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.document import Annotation, AnnotationField, Document, Segment, plain
from data_pipelines.errors import UserError
from data_pipelines.text import steps
from data_pipelines.text.steps import STEPS, Step, check_steps, run

CHINESE = ["control-characters", "tags", "empty-pairs"]


def text_after(names, text: str) -> str:
    return run(names, plain(text)).segments[0].text


def test_the_rules_for_wiki_text():
    text = "数学（ ）是《》一[（【】）]门<b class='x'>学科</b>。\x00\x07 1 < 2 and 3 > 2\tx\n"
    assert text_after(CHINESE, text) == "数学是一门学科。 1 < 2 and 3 > 2\tx\n"
    assert text_after(CHINESE, "one page\x0cNext\x0band\x85last\rold\r\nend") == "one page\nNext\nand\nlast\nold\nend"
    lines = '<doc id="13" title="数学">\n数学<br />\n</doc>\n'
    assert text_after(CHINESE, lines) == '<doc id="13" title="数学">\n数学\n</doc>\n'


def test_unicode_is_normalised():
    assert text_after(["nfc"], "e\u0301ﬁ") == "éﬁ"
    assert text_after(["nfkc"], "e\u0301ﬁ１") == "éfi1"


NAMES = st.lists(st.sampled_from(sorted(STEPS)), max_size=3)
PARTS = st.sampled_from(["()", "（", "）", "<b>", "</b>", "\x00", "e\u0301", "ﬁ", "中", " ", "a"])
TEXT = st.lists(PARTS, min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(NAMES, TEXT, TEXT, TEXT)
def test_an_annotation_keeps_its_characters(names, before, inside, after):
    before, inside, after = ("".join(part) for part in (before, inside, after))
    note = Annotation("label", 1, len(before), len(before + inside), "LOC")
    segments = (Segment("title", "()x"), Segment("text", before + inside + after))
    found = run(names, Document(segments, (note,)))
    assert [segment.text for segment in found.segments][0] == text_after(names, "()x")
    if expected := text_after(names, inside):
        (moved,) = found.annotations
        assert found.segments[1].text[moved.start : moved.end] == expected
        assert found.segments[1].text == text_after(names, before) + expected + text_after(names, after)
        assert moved._replace(start=0, end=0) == note._replace(start=0, end=0)
    else:
        assert not found.annotations


def test_an_annotator_is_a_step(monkeypatch):
    def words(document: Document) -> Document:
        text = document.segments[0].text
        found = [Annotation("words", 0, *match.span(), match[0]) for match in re.finditer(r"\w+", text)]
        return document._replace(annotations=document.annotations + tuple(found))

    monkeypatch.setitem(steps.STEPS, "words", Step(1, annotate=words, fields={"words": AnnotationField("label")}))
    found = run(["words", "nfc"], plain("ein Café au lait"))
    spans = [found.segments[0].text[note.start : note.end] for note in found.annotations]
    assert spans == ["ein", "Café", "au", "lait"]


def test_a_corpus_lists_names_and_versions_and_unknown_ones_are_an_error():
    assert check_steps(["nfc", "tags"]) == [("nfc", 1), ("tags", 1)]
    with pytest.raises(UserError, match="--steps nfd: there is no such step; there are nfc, nfkc"):
        check_steps(["nfd"])


@pytest.mark.parametrize("unit", ["(", "<", "<!--", "( ", "<a ", "()", "\n<doc id", "(" * 50 + ")" * 50])
@pytest.mark.timeout(60)  # quadratic, a million characters take hours
def test_hostile_text_takes_linear_time(unit):
    text = unit * (1_000_000 // len(unit))
    assert len(text_after(CHINESE, text)) <= len(text)
