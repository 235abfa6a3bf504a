"""`benchmarks.plans` compares what is alike, and bundles are counted as a core runs them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import plans
from benchmarks.bundles import bound, executed, read_bundles, total
from benchmarks.plans import PUBLISHED, SCALES, Options
from data_pipelines.errors import UserError
from pretrain.commands.planning import parse_plan
from tpu import xla
from tpu.costs import Spent, spent
from tpu.estimate import Estimate
from tpu.generations import GENERATIONS
from tpu.hlo import parse, runs
from tpu.mesh import Load, MeshShape, automatic_mesh
from tpu.topologies import parse_topology
from tpu.work import Work

GATED = {  # width, feed-forward, width of the keys, layers
    "32B": (8192, 28672, 8192, 32),
    "Llama2-70B": (8192, 28672, 1024, 80),
    "Llama3.1-8B": (4096, 14336, 1024, 32),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_have_the_products_of_the_published_ones(name):
    recipe, target = parse_plan(PUBLISHED[name].arguments.split())
    width, gated, keys, depth = GATED[name.partition(" on ")[0]]
    model = recipe.model
    assert (model.width, model.depth, model.width // model.heads) == (width, depth, 128)
    ours = 4 * width**2 + 2 * width * model.feed_forward
    assert ours == 2 * width**2 + 2 * width * keys + 3 * width * gated
    assert target.topology.partition(":")[0] in name and 0 < PUBLISHED[name].measured < 1


@pytest.mark.parametrize("generation", SCALES)
def test_few_and_many_chips_have_the_same_rows_each_and_the_meshes_that_the_project_chooses(generation, monkeypatch):
    monkeypatch.setattr(xla, "version", lambda package: "0.0.42.1")
    cases = plans.cases(Options("scaling", only=(generation,), recipe="bert-large --model.depth 3"))
    chip, beside = GENERATIONS[generation].device, xla.rides_in_products(GENERATIONS[generation].kinds[0])
    rows, first = SCALES[generation][0], next(iter(cases))
    for case, chips in zip(cases.values(), (8, 1024), strict=True):
        recipe, target = parse_plan(case.arguments.split())
        (phase,) = recipe.phases
        assert (phase.batch_size, phase.length, recipe.model.depth) == (rows * chips, 512, 3)
        shape = MeshShape(**{axis: int(size) for axis, size in (part.split("=") for part in target.mesh.split(","))})
        assert parse_topology(target.topology).chips * shape.slice == chips == shape.size
        load = Load(336.3e6, 2.534e14 / 256 * rows * chips, chip.hbm, chip, beside=beside)  # bert-large, 512 tokens
        assert automatic_mesh(chips, load, shape.slice) == shape
        assert target.topology.startswith(generation) and case.first == first


def test_a_row_has_its_share_of_the_peak_beside_what_was_measured_and_the_first_ones_step():
    step = Estimate(0.022, 0.021, 0.004, 0.0, 0.001, 0.001)
    work, topology = Work(None, (), {}, "data=16", 16, 256, 16, 512, 0.0, 0), parse_topology("v5e:4x4")
    planned = SimpleNamespace(work=work, topology=topology, collectives=(), report=SimpleNamespace(seconds=60))
    planned.flops = SimpleNamespace(total=0.3 * 0.022 * topology.device.peak_flops * 16)
    planned._replace = lambda estimate: SimpleNamespace(mfu=0.25)
    row = plans.line("a plan", "cycles", planned, step, 0.6, step._replace(seconds=0.020))
    figures = "22.0 | 1.100 | 21.00 | 4.00 | 1.00 | 0 | 25.0% | 30.0% | 60.0% | 0.50 | 60"
    assert row == f"| a plan | data=16 | 256 | cycles | {figures} |"
    columns = plans.HEAD.splitlines()[0].count("|")
    assert row.count("|") == columns == plans.line("a plan", "cycles", planned, step, None, None).count("|")


def test_what_no_table_has_is_said(monkeypatch):
    monkeypatch.setattr(plans, "prepare", lambda: None)
    with pytest.raises(UserError, match="--only: unknown v9; use one of v5e, v5p, v6e"):
        plans.main(["scaling", "--only", "v9"])
    with pytest.raises(UserError, match="no recipe 'calibratio'"):
        plans.main(["calibratio"])


@pytest.mark.parametrize("kept", [False, True])
def test_bundles_are_dumped_once_and_then_read(kept, tmp_path, monkeypatch):
    dumped = []
    monkeypatch.setattr(plans, "dump_to", dumped.append)
    file = tmp_path / "bundles.json"
    if kept:
        file.write_text('{"v6e": [[[100.0, "f32[8]"], 164]]}')
    compiler = plans._compiler(Options("scaling", bundles=file, cache=Path("a cache")), tmp_path)
    assert (compiler.cache, compiler.dump) == ((Path("a cache"), None) if kept else (tmp_path / "answers", *dumped))
    assert len(dumped) == (not kept) and compiler.known == ({"v6e": {(100.0, "f32[8]"): 164}} if kept else {})


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


def test_an_operation_takes_at_least_the_time_of_its_bytes():
    chip = GENERATIONS["v6e"].device
    assert bound(1750, Spent(1.0, 1638.0), chip) == pytest.approx(1e-6)
    assert bound(1750, Spent(1.0, 16380000.0), chip) == pytest.approx(1e-5)
