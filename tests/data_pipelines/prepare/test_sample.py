"""A tokenizer's text comes from all sources, the small ones with more than their share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.formats.source import Range
from data_pipelines.formats.table import parse, plan
from data_pipelines.prepare import sample
from data_pipelines.prepare.plan import Plan


def test_shares_are_smoothed_and_what_a_small_source_lacks_goes_to_the_others():
    assert sample.shares([1_000_000, 1_000_000], 1000) == [500, 500]
    large, small = sample.shares([10_000_000, 100_000], 1_000_000)
    assert small == pytest.approx(1_000_000 / (1 + 100**0.7), abs=1)
    assert large == pytest.approx(1_000_000 - small, abs=1)
    assert sample.shares([10_000_000, 100, 0], 1_000_000) == [999_900, 100, 0]
    assert sample.shares([300, 20], 1_000) == [300, 20]


@given(st.lists(st.integers(0, 10**13), max_size=20), st.integers(1, 10**10))
def test_shares_are_bounded_by_what_there_is_and_by_what_is_wanted(sizes, total):
    given_ = sample.shares(sizes, total)
    assert all(share <= size for share, size in zip(given_, sizes, strict=True))
    assert sum(given_) <= total
    assert sum(given_) >= min(total, sum(sizes)) - len(sizes)


def test_a_source_is_read_in_places_all_over_it_and_units_of_several_sources_are_taken_apart():
    units = [(Range(0, f"{number}", 0, None, 1000),) for number in range(200)]
    units.append((Range(0, "200", 0, None, 1000), Range(1, "small", 0, None, 50)))
    chosen = sample.stretches(Plan((tuple(units[:100]), tuple(units[100:]))), 2, 64_050)
    assert chosen[-1] == sample.Stretch((Range(1, "small", 0, None, 50),), None)
    assert len(chosen) == 65
    assert {stretch.characters for stretch in chosen[:-1]} == {1000}
    assert [int(stretch.ranges[0].path) for stretch in chosen[:-1]] == [number * 201 // 64 for number in range(64)]


def test_the_beginning_of_a_stretch_is_read_in_characters(tmp_path):
    for name in "ab":
        (tmp_path / name).with_suffix(".txt").write_text(f"{name} é and more")
    source = parse(f"text:{tmp_path}")
    (unit,) = plan([source], {})
    assert sample.read(sample.Stretch(unit, 20), [source]) == ["a é and more", "b é and "]
    assert sample.read(sample.Stretch(unit, None), [source]) == ["a é and more", "b é and more"]
