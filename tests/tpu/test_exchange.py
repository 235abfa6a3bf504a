"""What devices read of each other's rows where a mesh cuts them: right, and no more than there is to read."""

import itertools
import json
import os
import sys
from pathlib import Path
from subprocess import run

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from models.attention import sparse
from models.attention.mask import Mask
from models.attention.patterns.pattern import blocks_of, on_host
from models.core.sharding import placed_by
from tests.contract.test_contract import equations
from tests.tpu import exchanged
from tests.tpu.exchanged import BIGBIRD, HEAD_DIM, HEADS, LONG
from tpu.mesh import AXES
from tpu.rules import activation_rules

ROOT = Path(__file__).parent.parent.parent
MESHES = ("data=8", "sequence=8", "tensor=8", "data=2,sequence=2,tensor=2", "slice=2,fsdp=2,tensor=2")
PLACED = (
    "bigbird:sequence=8", "bigbird:data=2,tensor=2", "longformer:sequence=8", "causal:sequence=8",
    "repeats:data=2,sequence=2,tensor=2", "ranked:fsdp=2,sequence=4", "longformer:slice=2,sequence=2,tensor=2",
)  # fmt: skip
CUT = {"sequence=8": (8, 1), "sequence=4,tensor=2": (4, 2)}  # into parts of rows, groups of heads


def found(what, *meshes):
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tpu.exchanged", what, *meshes]
    environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    done = run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_chosen_positions_are_those_of_one_device_and_devices_exchange_no_more_than_them():
    chosen, positions = exchanged.ROWS * exchanged.READ * exchanged.WIDTH, found("positions", *MESHES)
    for mesh, figures in positions.items():
        assert max(figures["errors"]) <= 1e-6, mesh
        assert max((elements for _, elements, _ in figures["moved"]), default=0) <= chosen, mesh
    assert positions["data=8"]["moved"] == []


def test_the_softmax_in_blocks_is_that_of_one_device_and_no_device_reads_anothers_tokens():
    for mesh, figures in found("softmax", "data=8", "data=2,fsdp=2,tensor=2", "data=4,sequence=2").items():
        loss, *gradients = figures["errors"]
        assert loss <= 1e-2 and max(gradients) <= 1e-4, mesh  # the loss is a sum of 2,000
        assert {kind for kind, *_ in figures["moved"]} <= {"all-reduce"}, mesh
        of_blocks = max((elements for _, of_block, elements in figures["moved"] if of_block), default=0)
        assert of_blocks < exchanged.VOCAB * exchanged.WIDTH / 4, mesh  # not the table's gradient, which is summed once


def test_a_pattern_on_a_mesh_is_that_of_one_device_in_outputs_gradients_and_dropout():
    for placed, figures in found("attention", *PLACED).items():
        outputs, gradients = figures["errors"]
        assert outputs <= 2e-6 and max(gradients) <= 1e-5, placed


def named(parts, groups):
    """Bytes of what the device that reads most reads of others' by the table, forward and backward."""
    blocks = on_host(BIGBIRD, 1, HEADS, LONG)
    own, of_group, asked = blocks.drawn.shape[2] // parts, HEADS // groups, []
    for head, first in itertools.product(range(0, HEADS, of_group), range(0, blocks.drawn.shape[2], own)):
        tables = blocks.drawn[0, head : head + of_group, first : first + own]
        asked.append(sum(len(np.unique(table[table >= 0])) for table in tables))
    read = max(asked) + (len(blocks.offsets) - 1 + len(blocks.columns)) * of_group  # of keys and of values
    of_rows = len(blocks.rows) * of_group  # as queries there, as values back
    return 2 * 2 * (read + of_rows) * 4 * BIGBIRD.block * HEAD_DIM


@pytest.mark.parametrize("mesh", CUT)
def test_devices_exchange_what_the_table_names_and_hardly_more(mesh):
    (figures,), (parts, groups) = found("bytes", mesh).values(), CUT[mesh]
    kinds = {kind for kind, _, _ in figures["moved"]}
    assert kinds == {"collective-permute", "all-to-all", "all-reduce"}  # none gathers keys or values
    moved = sum(size for _, _, size in figures["moved"])
    assert named(parts, groups) <= moved <= 1.2 * named(parts, groups)  # as many blocks to each device as to any
    whole = 2 * 2 * LONG * HEADS // groups * HEAD_DIM * 4
    assert moved < whole * (0.4 if parts == 8 else 0.6)  # with 3 blocks drawn, those of 4 parts are most blocks


def test_devices_add_up_in_float32_also_what_is_bfloat16():
    """Columns, global tokens and what global queries see, and their gradients."""
    mesh = AbstractMesh((1, 1, 1, 4, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    x = jnp.zeros((1, 32 * BIGBIRD.block, HEADS, HEAD_DIM), jnp.bfloat16)
    with placed_by(activation_rules(mesh)):
        blocks = jax.tree.map(lambda array: array[0], blocks_of(BIGBIRD, 1, HEADS, x.shape[1]))
        mask = Mask(jnp.ones(x.shape[:2], jnp.int32), blocks=blocks, globals=jnp.zeros((1, 2), jnp.int32))
        attend = lambda *qkv: sparse.attention(*qkv, mask, dropout_rate=0.0, noise=None)
        traced = jax.make_jaxpr(lambda *qkv: jax.vjp(attend, *qkv)[1](x))(x, x, x)
    sums = [e for e in equations(traced.jaxpr) if "psum" in e.primitive.name and "sequence" in e.params["axes"]]
    assert len(sums) >= 8 and {array.aval.dtype.name for e in sums for array in e.invars} == {"float32"}
