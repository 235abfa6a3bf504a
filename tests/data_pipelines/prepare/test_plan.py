"""Units of text are dealt to parts of about one size, which begin where documents do; a plan travels as JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.formats.source import Other, Range
from data_pipelines.prepare import plan
from data_pipelines.prepare.plan import MIB


def unit(size: float, continues: bool = False, path: str = "a", version: str = "") -> tuple[Range, ...]:
    return (Range(0, path, 0, None, round(size * MIB), continues, version),)


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=60), st.integers(1, 100))
def test_every_unit_is_in_one_part_in_order_and_no_part_is_empty_or_twice_too_large(sizes, part_size):
    units = [unit(size, continues and bool(index)) for index, (size, continues) in enumerate(sizes)]
    found = plan.cut(units, part_size)
    assert [one for part in found.parts for one in part] == units
    assert all(found.parts)
    even = sum(size for size, _ in sizes) / max(1, round(sum(size for size, _ in sizes) / part_size))
    for number in found.numbers:
        assert found.size(number) / MIB < 3 * even + 20


def test_parts_are_about_equal_and_their_number_follows_from_their_size():
    sizes = [plan.cut([unit(8)] * 100, 100).size(number) / MIB for number in range(8)]
    assert sizes == [104, 96, 104, 96, 104, 96, 104, 96]
    assert len(plan.cut([unit(8)] * 100, 10_000).parts) == 1


def test_a_part_begins_where_a_document_does_unless_one_document_fills_it():
    units = [unit(1), unit(1, True), unit(1, True), unit(1), unit(1, True), unit(1)]
    assert [len(part) for part in plan.cut(units, 2).parts] == [3, 2, 1]
    long = plan.cut([unit(1)] + [unit(1, True)] * 11, 3)
    assert [len(part) for part in long.parts] == [6, 6]


def test_a_plan_is_the_same_after_json_and_its_hash_is_of_the_text():
    found = plan.cut([unit(1), unit(2, path="b\udcff", version="7")], 1, first=3, problems={"x": {"count": 1}})
    again = plan.of_json(found.to_json())
    assert again == found
    assert list(found.numbers) == [3, 4, 5][: len(found.parts)]
    assert found.hash == plan.cut([unit(1), unit(2, path="b\udcff", version="7")], 1).hash
    assert found.hash != plan.cut([unit(1), unit(2, path="b\udcff", version="8")], 1).hash


@pytest.mark.parametrize(
    "before, now, said",
    [
        ({"a": "1"}, {"a": "1"}, ""),
        ({"a": "1"}, {"a": "2"}, "a has changed"),
        ({"a": "1", "b": "1"}, {"b": "1", "c": "1"}, "a is gone, c is new"),
        (dict.fromkeys("abcde", "1"), {}, "a is gone, b is gone, c is gone and 2 more"),
    ],
)
def test_files_that_have_changed_are_named(before, now, said):
    assert plan.changed(before, now) == said


def test_a_range_of_two_files_is_the_same_after_json_and_both_are_watched():
    pair = (Range(0, "a.de", 0, 9, 9, False, "1", Other("a.en", 0, 8, "2")),)
    found = plan.cut([pair], 1)
    assert plan.of_json(found.to_json()) == found
    assert found.files() == {"a.de": "1", "a.en": "2"}
