"""The plans of `benchmarks.plans` can be made, and bundles are counted as a core runs them."""

import pytest

from benchmarks import plans
from benchmarks.bundles import executed, read_bundles, total
from data_pipelines.errors import UserError
from pretrain.commands.planning import parse_plan
from tpu.costs import spent
from tpu.generations import GENERATIONS
from tpu.hlo import parse, runs
from tpu.topologies import parse_topology


@pytest.mark.parametrize("what", ["calibration", "scaling", "t5"])
def test_every_case_is_a_plan_of_a_slice_that_there_is(what):
    for case in plans.cases(plans.Options(what)).values():
        recipe, target = parse_plan(case.arguments.split())
        assert recipe.phases[0].batch_size % parse_topology(target.topology).chips == 0


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


@pytest.mark.parametrize(
    "lines, bundles",
    [
        ([*loop(2, 1, 54), bundle(0x20)], 54 * 3 + 1),
        ([*loop(2, 1, 10), *loop(8, 1, 5)], 10 * 3 + 5 * 3),
        ([*loop(2, 1, 4)[:-1], *loop(0x10, 2, 7), loop(2, 1, 4)[-1]], 4 * (3 + 7 * 3)),
        (["window_bounds: 4\n", "second_minor_factor: 1 */ }\n"], 0),
    ],
    ids=["a loop", "two in a row", "one inside another", "comments over several lines"],
)
def test_bundles_count_as_often_as_their_loops_turn(lines, bundles):
    assert executed([*PROLOGUE, *lines]) == 2 + bundles


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
    assert total(module, bundles) == 2 * 164
    assert not list(tmp_path.iterdir())  # the next program's are alone


def test_two_cores_that_share_loops_are_refused(tmp_path):
    with pytest.raises(UserError, match="one core alone"):
        read_bundles(tmp_path, parse(PROGRAM), GENERATIONS["v5p"].device)
