"""What is compared has the same rows on each chip, of 8 and of 1,024."""

from types import SimpleNamespace

import pytest

from benchmarks import weak_scaling
from benchmarks.weak_scaling import SCALES
from data_pipelines.errors import UserError
from tpu import xla
from tpu.generations import GENERATIONS
from tpu.mesh import Load, MeshShape, automatic_mesh
from tpu.topologies import parse_topology
from tpu.work import Work


@pytest.mark.parametrize("generation", SCALES)
def test_the_same_rows_on_each_chip(generation, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(weak_scaling, "works", lambda recipe, target, topology: iter([((recipe, target), "")]))
    monkeypatch.setattr(weak_scaling, "plan", lambda work, *_: asked.append(work))
    rows, slices = SCALES[generation]
    for topology, mesh in slices.items():
        weak_scaling.planned_for(["bert-large", "--model.depth", "3"], topology, mesh, rows, tmp_path)
    number = [parse_topology(target.topology).chips * (4 if "slice=4" in target.mesh else 1) for _, target in asked]
    assert number == [8, 1024]
    for (recipe, target), chips in zip(asked, number, strict=True):
        (phase,) = recipe.phases
        assert (phase.batch_size, phase.length, recipe.model.depth) == (rows * chips, 512, 3)
        assert target.topology.startswith(generation)


@pytest.mark.parametrize("topology, mesh", [pair for _, slices in SCALES.values() for pair in slices.items()])
def test_the_meshes_are_those_that_the_project_chooses(topology, mesh, monkeypatch):
    monkeypatch.setattr(xla, "version", lambda package: "0.0.42.1")
    generation = topology.split(":")[0]
    chip, rows = GENERATIONS[generation].device, SCALES[generation][0]
    shape = MeshShape(**{axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))})
    beside = xla.rides_in_products(GENERATIONS[generation].kinds[0])
    load = Load(336.3e6, 2.534e14 / 256 * rows * shape.size, chip.hbm, chip, beside=beside)  # bert-large, 512 tokens
    assert automatic_mesh(shape.size, load, shape.slice) == shape


def planned(devices, seconds):
    work = Work(None, (), {}, f"data={devices}", devices, 16 * devices, devices, 512, 0.0, 0)
    step = SimpleNamespace(seconds=seconds, exposed=0.001)
    report = SimpleNamespace(seconds=60)
    return SimpleNamespace(work=work, topology="v5e:2x4", estimate=step, collectives=(), mfu=0.4, report=report)


def test_a_row_has_the_step_beside_the_first_ones():
    row = weak_scaling.line(planned(16, 0.022), planned(8, 0.020))
    assert row == "| 16 of v5e:2x4 | data=16 | 256 | 22.0 | 1.100 | 1.00 | 0 | 40.0% | 60 |"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--only", "v9"], "--only: unknown generation v9; use one of v5e, v5p, v6e"),
        (["--recipe", "bert-larg"], "no recipe 'bert-larg': did you mean bert-large"),
    ],
)
def test_what_nobody_can_plan_is_said(arguments, said, monkeypatch):
    monkeypatch.setattr(weak_scaling, "prepare", lambda: None)
    with pytest.raises(UserError, match=said):
        weak_scaling.main(arguments)
