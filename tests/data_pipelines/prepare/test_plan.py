"""Text is dealt to parts of about one size; a tokenizer's text is of all sources; what it does not know is said."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.formats import table
from data_pipelines.formats.source import Other, Range
from data_pipelines.prepare import plan, training
from data_pipelines.prepare.plan import MIB, Plan
from tests.data_pipelines.prepared import run


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
    pair = (Range(0, "a.de", 0, 9, 9, False, "1", Other("a.en", 0, 8, "2")),)
    units = lambda version: [unit(1), unit(2, path="b\udcff", version=version), pair]
    found = plan.cut(units("7"), 1, first=3, problems={"x": {"count": 1}})
    assert plan.of_json(json.loads(json.dumps(found._asdict()))) == found
    assert list(found.numbers) == [3, 4, 5][: len(found.parts)]
    assert found.hash == plan.cut(units("7"), 1).hash != plan.cut(units("8"), 1).hash
    assert {"a.de": "1", "a.en": "2"}.items() <= found.files().items()


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


def test_shares_are_smoothed_and_what_a_small_source_lacks_goes_to_the_others():
    assert training.shares([1_000_000, 1_000_000], 1000) == [500, 500]
    large, small = training.shares([10_000_000, 100_000], 1_000_000)
    assert small == pytest.approx(1_000_000 / (1 + 100**0.7), abs=1)
    assert large == pytest.approx(1_000_000 - small, abs=1)
    assert training.shares([10_000_000, 100, 0], 1_000_000) == [999_900, 100, 0]
    assert training.shares([300, 20], 1_000) == [300, 20]


@given(st.lists(st.integers(0, 10**13), max_size=20), st.integers(1, 10**10))
def test_shares_are_bounded_by_what_there_is_and_by_what_is_wanted(sizes, total):
    given_ = training.shares(sizes, total)
    assert all(share <= size for share, size in zip(given_, sizes, strict=True))
    assert sum(given_) <= total
    assert sum(given_) >= min(total, sum(sizes)) - len(sizes)


def test_a_source_is_read_in_places_all_over_it_and_units_of_several_sources_are_taken_apart():
    units = [(Range(0, f"{number}", 0, None, 1000),) for number in range(200)]
    units.append((Range(0, "200", 0, None, 1000), Range(1, "small", 0, None, 50)))
    chosen = training.stretches(Plan((tuple(units[:100]), tuple(units[100:]))), 2, 64_050)
    assert chosen[-1] == training.Stretch((Range(1, "small", 0, None, 50),), None)
    assert len(chosen) == 65
    assert {stretch.characters for stretch in chosen[:-1]} == {1000}
    assert [int(stretch.ranges[0].path) for stretch in chosen[:-1]] == [number * 201 // 64 for number in range(64)]


def test_the_beginning_of_a_stretch_is_read_in_characters(tmp_path):
    for name in "ab":
        (tmp_path / name).with_suffix(".txt").write_text(f"{name} é and more")
    source = table.parse(f"text:{tmp_path}")
    (found,) = table.plan([source], {})
    assert training.read_stretch(training.Stretch(found, 20), [source]) == ["a é and more", "b é and "]
    assert training.read_stretch(training.Stretch(found, None), [source]) == ["a é and more", "b é and more"]


def signs_of(path, kind):
    chance = np.random.default_rng(0)
    signs = [chr(0x4E00 + number) for number in range(600)]
    if kind == "wordlevel":
        signs = [f"word{number}" for number in range(600)]
    weights = 1 / np.arange(1, 601)
    path.write_text(" ".join(chance.choice(signs, 20_000, p=weights / weights.sum())))
    return f"text:{path}"


@pytest.mark.parametrize("kind", ["wordpiece", "wordlevel", "character-bpe"])
def test_the_size_that_is_said_cures(tmp_path, kind):
    source = signs_of(tmp_path / "a.txt", kind)
    _, printed = run(tmp_path / "small", source, tokenizer=kind, vocab_size=100)
    share, size = re.search(r"([\d.]+)% of the tokens are unknown.* --vocab-size (\d+) would cover", printed).groups()
    assert float(share) > 1
    _, printed = run(tmp_path / "large", source, tokenizer=kind, vocab_size=int(size))
    assert float(re.search(r"([\d.]+)% of the tokens are unknown to the tokenizer$", printed, re.M)[1]) < 0.1


def test_a_tokenizer_of_another_language_is_said(tmp_path):
    source = signs_of(tmp_path / "a.txt", "wordpiece")
    _, printed = run(tmp_path / "out", source)
    assert "100.000% of the tokens are unknown to the tokenizer; check that it is one for this language" in printed


def test_where_nothing_can_be_unknown_nothing_is_said(tmp_path):
    source = signs_of(tmp_path / "a.txt", "bpe")
    _, printed = run(tmp_path / "out", source, tokenizer="bpe", specials="gpt2", vocab_size=300)
    assert "unknown" not in printed
