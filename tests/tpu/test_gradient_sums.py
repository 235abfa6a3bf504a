"""Devices add weight gradients up in float32, whatever the products are computed in, and each once."""

import functools
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.core.parameters import decays, leaves
from models.core.program import Program
from pretrain.training import placement
from pretrain.training.assembly import assemble
from tests.tpu import simulated
from tpu import hlo
from tpu.collectives import collectives

# What is compiled is dumped, so that nothing may come from a cache.
pytestmark = pytest.mark.own_process(devices=4, JAX_ENABLE_COMPILATION_CACHE="0")
SUMS = ("all-reduce", "reduce-scatter")
WIDTH = 32  # of the two layers of the tests' BERT


@functools.cache
def partitioned(name, mesh):
    """A recipe's step in bfloat16 as XLA partitions it, before the CPU's compiler widens what it cannot add so.

    arrays: (kind, dtype, source, elements that each device exchanges).   size: parameter path -> scalars.
    """
    assembly = assemble(simulated.recipe(name), Program(dtype="bfloat16"))
    step = placement.stages(assembly, simulated.mesh_of(mesh))[0].train
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        step.run.lower(*step.arguments).compile(compiler_options=dump)
        (file,) = Path(folder).glob("*placed*.after_spmd-partitioning*.txt")
        module = hlo.parse(file.read_text())
    found = [collective for collective in collectives(module) if collective.group > 1]
    arrays = [(c.kind, a.dtype, c.source, c.times * math.prod(a.dims)) for c in found for a in c.arrays]
    size = {path: shape.size for path, shape in leaves(step.arguments[0].params)}
    return SimpleNamespace(assembly=assembly, arrays=arrays, size=size)


def exchanged(program, *kinds):
    """Numbers that devices exchange."""
    return sum(elements for kind, _, _, elements in program.arrays if kind in kinds)


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


OTHERS = [("electra", "data=2"), ("xlnet", "data=2"), ("adaptive", "data=2"), ("adaptive", "fsdp=2")]
OTHERS += [("transformer-xl", "fsdp=2")]


@pytest.mark.parametrize(
    "name, mesh", [("bert", "data=2,fsdp=2"), *slow(("bert", "data=2"), ("bert", "fsdp=2"), *OTHERS)]
)
def test_gradients_are_summed_in_float32_and_kernels_are_still_gathered_in_bfloat16(name, mesh):
    program = partitioned(name, mesh)
    sums = [(dtype, source) for kind, dtype, source, _ in program.arrays if kind in SUMS]
    assert any("feed_forward/up/dot_general" in source for _, source in sums)
    assert {dtype for dtype, _ in sums} <= {"f32", "s32"}
    gathers = [(dtype, source) for kind, dtype, source, _ in program.arrays if kind == "all-gather"]
    kernels = {dtype for dtype, source in gathers if "Layer" in source and "dot_general" in source}
    assert kernels == ({"bf16"} if "fsdp" in mesh else set())


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", *slow(("data=2",), ("fsdp=2",))])
def test_devices_exchange_no_more_than_the_mesh_implies(mesh):
    """Each gradient is summed once, that of BERT's table for its lookups and for its logits; over data and fsdp, the
    shares of matrices once more. Over data nothing is gathered, over fsdp each matrix for either pass."""
    program, by_fsdp = partitioned("bert", mesh), "fsdp" in mesh
    parameters, table = sum(program.size.values()), program.size["embeddings/tokens"]
    matrices = sum(program.size[row.path] for row in program.assembly.table if decays(row))
    implied = parameters + table + (matrices / 2 if mesh == "data=2,fsdp=2" else 0)
    # A few scalars are summed beside; BERT's pooler is resharded instead.
    assert -0.05 * parameters < exchanged(program, *SUMS) - implied < 100
    assert by_fsdp * matrices <= exchanged(program, "all-gather") <= 2 * by_fsdp * matrices


def test_over_tensor_devices_sum_a_layer_s_activations_and_nothing_else():
    """BERT's look-ups, and of each layer attention's and feed-forward's outputs and four gradients of inputs: of
    queries, keys, values and feed-forward; of the last layer by the positions that are read. Of the logits their
    maximum, sum, target and the gradient of what they came from. No weight's gradient, and nothing is gathered."""
    program = partitioned("bert", "tensor=2")
    phase, objective = program.assembly.recipe.phases[0], program.assembly.recipe.objective
    rows, length, predictions = phase.batch_size, phase.length, objective.predictions(phase)
    whole, read = rows * length * WIDTH, rows * (predictions + 1) * WIDTH  # the first token, for pairs
    first, last, logits = 6 * whole, 2 * whole + 4 * read, rows * predictions * (3 + WIDTH)
    assert 0 <= exchanged(program, *SUMS) - (whole + first + last + logits) < 100  # a few scalars
    assert exchanged(program, "all-gather", "collective-permute", "all-to-all") == 0
