"""Collectives of a program, read from its text."""

from pathlib import Path

import pytest

from tests.tpu.simulated import collectives
from tpu import hlo
from tpu.hlo import Array


def loop(first=0, bound=24, step=1, condition="compare(%i, %bound), direction=LT"):
    """As XLA:TPU prints one: no trip count, the counter in a tuple."""
    return f"""HloModule step, num_partitions=8

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0:T(128)S(1)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %x = f32[4]{{0:T(128)S(1)}} get-tuple-element(%p), index=1
  %one = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)}} add(%i, %one)
  %r = f32[4]{{0:T(128)}} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[]{{:T(128)}}, f32[4]{{0:T(128)}}) tuple(%next, %r)
}}

%condition (p.1: (s32[], f32[4])) -> pred[] {{
  %bound = s32[]{{:T(128)}} constant({bound})
  %p.1 = (s32[], f32[4]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p.1), index=0
  ROOT %lt = pred[]{{:T(512)}} {condition}, metadata={{op_name="jit(step)/while/cond/lt"}}
}}

ENTRY %main (a: f32[4]) -> (s32[], f32[4]) {{
  %a = f32[4]{{0}} parameter(0)
  %start = s32[] constant({first})
  %copied = s32[] copy(%start)
  %t.1 = (s32[], /*index=1*/f32[4]{{0}}) tuple(%copied, %a)
  ROOT %w = (s32[], f32[4]{{0}}) while(%t.1), condition=%condition, body=%body, metadata={{op_name="while"}}
}}
"""


@pytest.mark.parametrize("settings, turns", [({}, 24), ({"first": 4}, 20), ({"step": 2}, 12), ({"step": 5}, 5)])
def test_turns_of_a_loop_from_its_counter(settings, turns):
    (found,) = collectives(hlo.parse(loop(**settings)))
    assert (found.times, found.group, found.bytes) == (turns, 4, turns * 16)


@pytest.mark.parametrize("bound, turns, by_data", [("constant(24)", 24, 0), ("reduce(%a)", 1, 1)])
def test_a_loop_with_a_carried_bound_takes_one_turn_if_the_program_computes_it(bound, turns, by_data):
    text = loop().replace("constant(24)", "get-tuple-element(%p.1), index=2").replace("%copied, %a", "%copied, %a, %n")
    module = hlo.parse(text.replace("  %start =", f"  %n = s32[] {bound}\n  %start ="))
    (found,) = collectives(module)
    assert (found.times, hlo.loops_ended_by_data(module)) == (turns, by_data)


@pytest.mark.parametrize("bound", ["constant(24)", "get-tuple-element(%p.1), index=0"])
def test_a_loop_of_unknown_length_is_an_error(bound):
    text = loop(condition="compare(%i, %bound), direction=GT").replace("constant(24)", bound)
    with pytest.raises(ValueError, match="how often the loop w runs"):
        collectives(hlo.parse(text))


# XLA:TPU's: groups as axes of a mesh, asynchronous pairs, and one gather copied into two fusions beside work.
FORMS = (Path(__file__).parent / "dumps" / "forms_tpu.hlo").read_text()


def test_the_forms_of_the_tpu_compiler():
    found = [((c.kind, c.group, c.channel), c.bytes) for c in collectives(hlo.parse(FORMS))]
    two = ("reduce-scatter", 2, ""), 2 * 64 * 32 * 4  # several arrays in one; both have the same channel
    assert found.count(two) == 2
    rest = [one for one in found if one != two]
    assert len(rest) == len(dict(rest))
    assert dict(rest) == {
        ("all-gather", 16, "31"): 32 * 128 * 2,  # once, though it stands in two fusions
        ("reduce-scatter", 4, "4"): 64 * 128 * 4,
        ("reduce-scatter", 8, ""): 64 * 128 * 4,
        ("send", 2, ""): 128 * 4,  # to another slice
        ("collective-permute", 2, ""): 2 * 128 * 2,
        ("all-gather", 4, ""): 8 * 128 * 2,
        ("all-reduce", 16, ""): 2 * 128 * 2 + 3,  # several arrays in one; over a single device it is none
    }


def test_arrays_of_a_shape():
    shape = "(bf16[16,128]{1,0:T(8,128)(2,1)S(1)}, /*index=5*/pred[], s4[8], f8e4m3fn[2]{0})"
    found = hlo.arrays(shape)
    assert found == (Array("bf16", (16, 128), 1), Array("pred", ()), Array("s4", (8,)), Array("f8e4m3fn", (2,)))
    assert [array.bytes for array in found] == [4096, 1, 4, 2]
