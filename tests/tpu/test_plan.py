"""The estimate and the largest batch, from made-up answers of the compiler."""

import math

import pytest

from tpu import hlo, plan_report
from tpu.compiler import Report
from tpu.costs import Costs, Lookups, costs
from tpu.estimate import ADDED, FETCHED, clocks, estimate, kernel_seconds, lookup_seconds
from tpu.flops import Flops
from tpu.generations import GENERATIONS
from tpu.kernel_costs import Call, Cost
from tpu.overlap import Timeline
from tpu.plan import Largest, Plan, largest_batch
from tpu.topologies import parse_topology
from tpu.work import Work

V5E = parse_topology("v5e:4x4")
# On v5e 15e6 cycles are 10 ms, 8.19e9 bytes of HBM are 10 ms, and 1.97e12 FLOPs per chip are 10 ms at the peak.
BUSY = Costs(cycles=15e6, sources={}, traffic=8.19e8, lookups=Lookups(), kernels={}, unknown=())
LINE = Timeline(work=10e-3, waits=0.0, busy=0.0, collectives=())
WORK = Work(None, (), {}, "data=16", 16, rows=32, rows_multiple=16, length=128, model_flops=16 * 1e12, checkpoint=0)
FLOPS = Flops(16 * 1e12, {})


def ms(found=BUSY, line=LINE, flops=FLOPS, work=WORK, kernels=None):
    inside = kernel_seconds(flops, work, V5E, kernels or {})
    estimated = estimate(found, line, flops, inside, work, V5E)
    return estimated.seconds and 1000 * estimated.seconds, estimated.why_not


def test_the_longer_of_computing_and_moving_counts_and_waiting_for_collectives_adds_up():
    assert ms() == (pytest.approx(10), "")
    assert ms(BUSY._replace(traffic=8.19e9 * 3)) == (pytest.approx(30), "")
    assert ms(line=LINE._replace(waits=4e-3, busy=20e-3)) == (pytest.approx(14), "")


def test_lookups_take_their_rows_and_their_bytes():
    chip = GENERATIONS["v5e"].device
    assert lookup_seconds(Lookups(bytes=8.19e8), chip) == pytest.approx(1e-3)
    assert lookup_seconds(Lookups(fetched=1500), chip) == pytest.approx(FETCHED * 1e-6)
    assert lookup_seconds(Lookups(added=1500), chip) == pytest.approx(ADDED * 1e-6)


def test_a_kernel_takes_the_cycles_that_it_declares():
    call = Call((), (), turns=3, flops=1e11)
    inside = Flops(16 * 1e12, {"attend": 16 * 10 * 1e11}, calls=(("attend", call, 16 * 10),))
    kernel = {"attend": Cost(lambda generation, call: {"v5e": 1e6}[generation] * call.turns)}
    assert kernel_seconds(inside, WORK, V5E, kernel) == {"attend": pytest.approx(20e-3)}


def test_each_run_of_a_kernel_takes_its_share_of_them():
    text = """HloModule step

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %attend_all.1 = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call"
  ROOT %attend_all.2 = f32[8]{0} custom-call(%attend_all.1), custom_call_target="tpu_custom_call"
}
"""
    module = hlo.parse(text)
    work = clocks(module, costs(module), {"attend": 20e-3}, WORK, V5E).work
    assert [work(run) for run in hlo.runs(module)] == [0, 10e-3, 10e-3]


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"line": LINE._replace(work=5e-3)}, "faster than the chip's peak"),  # 1e12 FLOPs take at least 5.08 ms
        ({"flops": Flops(16 * 4e12, {})}, "faster than the chip's peak"),
        ({"found": BUSY._replace(unknown=("convolution.3",))}, "no cost is known for convolution.3"),
        ({"flops": Flops(16e12, {}, ("splash",))}, "no cost is known for splash"),
        ({"found": BUSY._replace(kernels={"splash": 1})}, "the program has kernels that its trace does not have"),
    ],
)
def test_what_is_implausible_is_no_estimate(changes, why):
    seconds, why_not = ms(**changes)
    assert seconds is None and why in why_not


def compiler(fixed, per_row, bend=math.inf, bent=1.0):
    """(total, asked): bytes by rows; above `bend` rows they grow `bent` times as fast."""
    asked = []

    def total(rows):
        asked.append(rows)
        return fixed + per_row * (min(rows, bend) + bent * max(rows - bend, 0))

    return total, asked


def test_a_line_finds_the_largest_batch_in_three_compilations():
    total, asked = compiler(fixed=4e9, per_row=1e7)
    assert largest_batch(total, 4e9, rows=64, multiple=16, capacity=16e9) == Largest(1200, True)
    assert len(asked) == 3 and max(asked) == 1200


def test_a_batch_that_does_not_fit_leads_down():
    total, _ = compiler(fixed=4e9, per_row=1e7)
    assert largest_batch(total, 4e9, 4096, 16, 16e9) == Largest(1200, True)


def test_the_range_is_that_of_the_worst_ratios_of_the_generation(monkeypatch):
    ratios = {"a": ("v5p", 0.8), "b": ("v5p", 1.25), "c": ("v5p", 1.0), "d": ("v6e", 0.5)}
    monkeypatch.setattr(plan_report, "RATIOS", ratios)
    assert plan_report.span(0.5, "v5p") == (0.4, 0.625)
    assert plan_report.span(0.9, "v5p") == (pytest.approx(0.72), 1.0)
    assert plan_report.span(0.4, "v6e") == (0.4, 0.8)
    assert plan_report.span(0.4, "v4") == (pytest.approx(0.32), 0.8), "not measured: the worst of all"


def planned(total, parts=None, **work):
    """A plan whose step takes so many bytes of v5e's 15.75 GiB."""
    report = Report(1.0, total, 0, 0, 0, 0, "")
    return Plan(V5E, WORK._replace(**work), report, parts or {"batch": 1 << 20}, FLOPS, None, (), None)


def test_a_margin_stays_free_and_a_checkpoint_waiting_batches_and_an_evaluation_need_room():
    assert planned(15 << 30).fits and not planned(int(15.5 * 2**30)).fits
    parts = {"parameters": 11 << 30}
    assert planned(12 << 30, parts).fits and planned(12 << 30, parts).needed == 12 << 30
    saved = planned(12 << 30, parts, checkpoint=6 << 30)
    waiting = planned(12 << 30, {"batch": 1 << 30}, ahead=9)
    evaluated = planned(12 << 30)._replace(evaluation=16 << 30)
    for found, needed in (saved, 17), (waiting, 21), (evaluated, 16):
        assert not found.fits and found.needed == needed << 30


def test_answers_without_a_size_give_what_was_seen_to_fit():
    total = lambda rows: 1e9 * rows if rows <= 8 else math.inf
    found = largest_batch(total, 0.0, 32, 8, 16e9)
    assert found == Largest(8, False)
