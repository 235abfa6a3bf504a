"""Cycles and memory traffic, on programs small enough to add up by hand."""

from pathlib import Path

import pytest

from tpu import hlo
from tpu.costs import Lookups, costs

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
# A loop of 10 turns: each slices a layer [128, 128] out of a stack of 10 in HBM, in a fusion inside of a fusion, and
# writes its result into another stack. `fast` is in the chip's own memory, S(1).
LOOP = (Path(__file__).parent / "dumps" / "loop.hlo").read_text()
LAYER, STACK = 128 * 128 * 4, 10 * 128 * 128 * 4


def test_a_loop_counts_as_often_as_it_runs():
    found = costs(hlo.parse(LOOP))
    assert found.cycles == 10 * 300 + 50
    assert found.sources == {"backward Layer/up": 3000, "negate": 50}
    assert found.unknown == () and found.kernels == {}


def test_a_slice_of_a_stack_moves_a_slice():
    # A turn reads and writes one layer, its counter, and the additions of 4 bytes; the negation reads and writes all.
    moved = costs(hlo.parse(LOOP)).traffic
    assert moved == pytest.approx(10 * 2 * LAYER + 2 * STACK, rel=1e-3)


def only(instruction, before=""):
    text = f"HloModule step\n\n{before}ENTRY %main (a: f32[64,128], b: f32[64,128]) -> f32[64,128] {{\n"
    text += "  %a = f32[64,128]{1,0} "
    text += "parameter(0)\n  %b = f32[64,128]{1,0} parameter(1)\n  " + instruction + "\n}\n"
    return costs(hlo.parse(text))


def test_a_product_without_cycles_is_named():
    assert only("ROOT %c = f32[64,64]{1,0} convolution(%a, %b), dim_labels=bf_oi->bf").unknown == ("c",)
    assert costs(hlo.parse(LOOP.replace("estimated_cycles", "other"))).unknown == ("f",)


def test_lookups_without_cycles_count_their_rows():
    found = only("ROOT %gather.1 = f32[64,128]{1,0} gather(%a, %b), offset_dims={1}, slice_sizes={1,128}")
    assert found.lookups == Lookups(64, 0, 2 * 64 * 128 * 4) and found.unknown == ()
    assert found.traffic == found.lookups.bytes
    added = "ROOT %scatter.1 = f32[64,128]{1,0} scatter(%a, %b, %a), update_window_dims={1}"
    assert only(added).lookups[:2] == (0, 64)


def test_a_gather_between_devices_is_no_lookup():
    found = only("ROOT %all-gather.1 = f32[64,128]{1,0} all-gather(%a), replica_groups={{0,1}}, dimensions={0}")
    assert found.lookups == Lookups() and found.cycles == 0


@pytest.mark.parametrize(
    "start, size",
    [
        ("((f32[64,128]{1,0}), f32[16,128]{1,0:S(1)}, s32[]) async-start(%a), calls=%slice", 16 * 128 * 4),
        ("(f32[64,128]{1,0:S(1)}, f32[64,128]{1,0}, u32[]) copy-start(%a)", 64 * 128 * 4),
    ],
)
def test_a_fetch_ahead_moves_what_it_fetches(start, size):
    text = "%slice (p: f32[64,128]) -> f32[16,128] {\n  %p = f32[64,128]{1,0} parameter(0)\n  "
    text += "ROOT %s = f32[16,128]{1,0} slice(%p), slice={[0:16], [0:128]}\n}\n\n"
    assert only(f"ROOT %start = {start}", before=text).traffic == size


def test_custom_kernels_are_counted():
    call = 'ROOT %k = f32[64,128]{1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call", '
    found = only(call + CYCLES % 7)
    assert found.kernels == {"k": 1} and found.cycles == 0 and found.traffic == 3 * 64 * 128 * 4
