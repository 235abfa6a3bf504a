"""What is compared has the same rows on each chip, of 8 and of 1,024."""

import pytest

from benchmarks import weak_scaling
from benchmarks.weak_scaling import SCALES
from tpu.topologies import parse_topology


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
