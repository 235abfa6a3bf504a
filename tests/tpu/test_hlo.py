"""Collectives of a program, read from its text."""

import os
import re
import sys
from pathlib import Path
from subprocess import run

import pytest

from tpu import hlo
from tpu.collectives import collectives
from tpu.hlo import Array

ROOT = Path(__file__).parent.parent.parent

# Every kind of collective in a loop of 5 turns, and a parameter gathered by the partitioner outside of it.
PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

def body(x, _):
    x = jax.lax.all_gather(x, "data", tiled=True)
    x = jax.lax.psum_scatter(x, "data", tiled=True)
    x = jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)])
    x = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
    return jax.lax.psum(x, ("data", "tensor")), None

inner = lambda x: jax.lax.scan(body, x, None, length=5)[0]
looped = jax.shard_map(inner, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
whole = lambda x, w: looped(x) @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
print(jax.jit(whole).lower(place((32, 16), P("data")), place((16, 64), P(None, "tensor"))).compile().as_text())
"""


@pytest.fixture(scope="module")
def text():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = run([sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def summary(text):
    return {(c.kind, c.group, c.times): c.bytes for c in collectives(hlo.parse(text))}


EXPECTED = {  # per device: f32[32, 16] is 2 KiB, a device's share of its rows f32[8, 16] 512 bytes
    ("all-gather", 4, 5): 5 * 2048,
    ("reduce-scatter", 4, 5): 5 * 2048,
    ("collective-permute", 2, 5): 5 * 512,
    ("all-to-all", 4, 5): 5 * 512,
    ("all-reduce", 8, 5): 5 * 512,
    ("all-gather", 2, 1): 16 * 64 * 4,
}


def test_collectives_of_a_real_program_with_their_loop(text):
    assert hlo.parse(text).devices == 8
    assert summary(text) == EXPECTED


def test_a_loop_whose_turns_xla_did_not_note(text):
    without = re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", text)
    assert without != text
    assert summary(without) == EXPECTED


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


PAIR = """%all-reduce-scatter.NUMBER (p: f32[64,32], q: f32[64,32]) -> (f32[32,32], f32[32,32]) {
  %p = f32[64,32]{1,0} parameter(0)
  %q = f32[64,32]{1,0} parameter(1)
  %both = (f32[64,32]{1,0}, f32[64,32]{1,0}) all-reduce(%p, %q), channel_id=1, replica_groups=[8,2]<=[16], to_apply=%add
  %id = u32[] partition-id()
  %first = f32[64,32]{1,0} get-tuple-element(%both), index=0
  %kept.1 = f32[32,32]{1,0} dynamic-slice(%first, %id), dynamic_slice_sizes={32,32}
  %second = f32[64,32]{1,0} get-tuple-element(%both), index=1
  %kept.2 = f32[32,32]{1,0} dynamic-slice(%second, %id), dynamic_slice_sizes={32,32}
  ROOT %pair = (f32[32,32]{1,0}, f32[32,32]{1,0}) tuple(%kept.1, %kept.2)
}
"""
# XLA:TPU's forms: groups as axes of a mesh, asynchronous pairs, and one gather copied into two fusions beside work.
TPU = """HloModule step, is_scheduled=true, num_partitions=16

%fused.1 (p: bf16[2,128]) -> bf16[32,128] {
  %p = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %g.1 = bf16[32,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=31, replica_groups=mesh['a'=16,'b'=1] {'a'}, \
dimensions={0}
}

%fused.2 (p: bf16[2,128]) -> bf16[32,128] {
  %p = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %g.2 = bf16[32,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=31, replica_groups=mesh['a'=16,'b'=1] \
{'a'}, dimensions={0}
}

%wrapped (p: f32[64,128]) -> f32[16,128] {
  %p = f32[64,128]{1,0} parameter(0)
  ROOT %rs = f32[16,128]{1,0} reduce-scatter(%p), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, \
to_apply=%add
}

%all-reduce-scatter (p: f32[64,128]) -> f32[16,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %r = f32[64,128]{1,0} all-reduce(%p), channel_id=9, replica_groups=[2,8]<=[16], to_apply=%add
  %id = u32[] partition-id()
  ROOT %kept = f32[8,128]{1,0} dynamic-slice(%r, %id), dynamic_slice_sizes={8,128}
}

PAIRS
ENTRY %main (a: bf16[2,128], b: f32[64,128]) -> f32[] {
  %a = bf16[2,128]{1,0} parameter(0)
  %b = f32[64,128]{1,0} parameter(1)
  %f.1 = bf16[32,128]{1,0} fusion(%a), kind=kCustom, calls=%fused.1
  %f.2 = bf16[32,128]{1,0} fusion(%a), kind=kCustom, calls=%fused.2
  %s = ((f32[64,128]{1,0}), f32[16,128]{1,0}, u32[]) async-start(%b), calls=%wrapped
  %d = f32[16,128]{1,0} async-done(%s), calls=%wrapped
  %ps = (bf16[2,128]{1,0}, bf16[2,128]{1,0:S(1)}, u32[], u32[]) collective-permute-start(%a), channel_id=5, \
source_target_pairs={{0,1},{1,0}}
  %pd = bf16[2,128]{1,0} collective-permute-done(%ps)
  %ags = (bf16[2,128]{1,0}, bf16[8,128]{1,0}) all-gather-start(%a), channel_id=6, dimensions={0}, \
replica_groups=mesh['x'=2,'y'=8] {'x','y':(1)2}
  %agd = bf16[8,128]{1,0} all-gather-done(%ags)
  %scattered = f32[8,128]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter
  %pairs.1 = (f32[32,32]{1,0}, f32[32,32]{1,0}) fusion(%c, %c), kind=kCustom, calls=%all-reduce-scatter.1
  %pairs.2 = (f32[32,32]{1,0}, f32[32,32]{1,0}) fusion(%c, %c), kind=kCustom, calls=%all-reduce-scatter.2
  %to = (f32[1,128]{1,0}, u32[], token[]) send(%c, %after-all), channel_id=2, is_host_transfer=true
  %half = (bf16[2,128]{1,0}, pred[3]) all-reduce(%a, %m), channel_id=7, replica_groups={}, to_apply=%add
  %alone = f32[64,128]{1,0} all-reduce(%b), replica_groups=mesh['a'=16,'b'=1] {'b'}, to_apply=%add
  ROOT %z = f32[] constant(0)
}
""".replace("PAIRS\n", PAIR.replace("NUMBER", "1") + "\n" + PAIR.replace("NUMBER", "2") + "\n")


def test_the_forms_of_the_tpu_compiler():
    found = [((c.kind, c.group, c.channel), c.bytes) for c in collectives(hlo.parse(TPU))]
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


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("error: not found")
