"""Bundles are counted as a core runs them."""

import pytest

from benchmarks.bundles import bound, executed, read_bundles
from data_pipelines.errors import UserError
from tpu.costs import Spent, spent
from tpu.generations import GENERATIONS
from tpu.hlo import parse, runs

EXIT = "%p1 = scmp.ge.s32.totalorder %s1, TURNS /* loop exit test */"


def bundle(address, depth=0, label="  ", inside="%v1 = vadd.f32 %v2, %v3"):
    mark = "> " * depth
    return f"{address:#6x} {label} : {mark}{{ {inside} }}\n" if address else f"     0   : {mark}{{ {inside} }}\n"


def loop(address, depth, turns, length=3):
    """Of so many bundles, the last of which has the test."""
    first, *others = (bundle(address + n, depth) for n in range(length - 1))
    return [first.replace("  ", " ", 1).replace("  : ", "LB: ", 1), *others, bundle(address + length, depth, "  ",
            EXIT.replace("TURNS", str(turns)))]  # fmt: skip


PROLOGUE = ["= control target key start\n", "LB: loop body\n", "= control target key end\n", bundle(0), bundle(1)]


def test_a_loop_counts_as_often_as_it_turns():
    assert executed([*PROLOGUE, *loop(2, 1, 54), bundle(0x20)]) == 2 + 54 * 3 + 1


def test_two_loops_in_a_row_and_one_inside():
    assert executed([*PROLOGUE, *loop(2, 1, 10), *loop(8, 1, 5)]) == 2 + 10 * 3 + 5 * 3
    outer = loop(2, 1, 4)
    assert executed([*PROLOGUE, *outer[:-1], *loop(0x10, 2, 7), outer[-1]]) == 2 + 4 * (3 + 7 * 3)


def test_comments_over_several_lines_are_no_bundles():
    assert executed([*PROLOGUE, "window_bounds: 4\n", "second_minor_factor: 1 */ }\n"]) == 2


def test_loops_that_the_data_end_are_not_guessed():
    assert executed([*PROLOGUE, *loop(2, 1, 4)[:-1], bundle(0x10)]) is None


A = "f32[1024,1024]{1,0}"
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"COUNT"}}'
PROGRAM = f"""HloModule step

%add (p: f32[8]) -> f32[8] {{
  ROOT %p = {A} parameter(0)
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = {A} parameter(0)
  %first = {A} fusion(%a), kind=kLoop, calls=%add, {CYCLES.replace("COUNT", "100")}
  %other = {A} fusion(%first), kind=kLoop, calls=%add, {CYCLES.replace("COUNT", "300")}
  ROOT %equal = {A} fusion(%other), kind=kLoop, calls=%add, {CYCLES.replace("COUNT", "100")}
}}
"""


def test_equal_operations_have_the_bundles_of_the_one_that_is_dumped(tmp_path):
    module = parse(PROGRAM)
    (tmp_path / "123-first-01-final_bundles.txt").write_text("".join([*PROLOGUE, *loop(2, 1, 54)]))
    (tmp_path / "123-first-00-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:\n")
    bundles = read_bundles(tmp_path, module, GENERATIONS["v6e"].device)
    of = {run.instruction.name: (spent(module, run).cycles, run.instruction.shape) for run in runs(module)}
    assert bundles == {of["first"]: 164} and of["equal"] == of["first"] != of["other"]
    assert not list(tmp_path.iterdir())  # the next program's are alone


def test_two_cores_that_share_loops_are_refused(tmp_path):
    with pytest.raises(UserError, match="one core alone"):
        read_bundles(tmp_path, parse(PROGRAM), GENERATIONS["v5p"].device)


def test_an_operation_takes_at_least_the_time_of_its_bytes():
    chip = GENERATIONS["v6e"].device
    assert bound(1750, Spent(1.0, 1638.0), chip) == pytest.approx(1e-6)
    assert bound(1750, Spent(1.0, 16380000.0), chip) == pytest.approx(1e-5)
