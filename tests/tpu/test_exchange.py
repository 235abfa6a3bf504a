"""What devices read of each other's rows where a mesh cuts them: right, and no more than there is to read."""

import functools
import math
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention import sparse
from models.attention.mask import Mask
from models.attention.patterns.pattern import Pattern, blocks_of
from models.blocks.positions import gather_positions
from models.core.parameters import decays, leaves
from models.core.program import Program
from models.core.sharding import placed_by
from pretrain.objectives import blocked_softmax
from pretrain.training import placement
from pretrain.training.assembly import assemble
from tests.contract.test_contract import equations
from tests.models.test_sparse import Kind, random_case
from tests.tpu import simulated
from tests.tpu.simulated import check_close, collectives, mesh_of
from tpu import hlo
from tpu.mesh import AXES
from tpu.rules import activation_rules

pytestmark = pytest.mark.own_process(devices=8, JAX_ENABLE_COMPILATION_CACHE="0")  # what is compiled is dumped
ROWS, LENGTH, WIDTH, READ, VOCAB = 8, 64, 16, 10, 128
BIGBIRD = Pattern("bigbird", block=8)
LONG, HEADS, HEAD_DIM = 4096, 4, 8
AROUND = tuple(range(-5, 6))  # over more than one neighbour, where a part has 4 blocks
KINDS = {
    "bigbird": Kind(128, 4, columns=(0, 31), rows=(0, 31), drawn=3, heads=2, rate=0.2),
    "longformer": Kind(128, 4, AROUND, reach=True, heads=2, globals=3, rate=0.1),
    "repeats": Kind(128, 4, (-1, 0, 3), columns=(5,), rows=(9, 10), drawn=4, heads=1),
    "causal": Kind(128, 4, (-9, -1, 0), columns=(3,), rows=(30,), drawn=2, heads=2, causal=True, rate=0.3),
    "ranked": Kind(128, 4, columns=(7,), rows=(8,), drawn=1, heads=2, globals=2, ranked=True),
}


def rules_of(text):
    return activation_rules(mesh_of(text))


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def moved(program):
    """(kind, elements, bytes, whether in a loop) of each array that devices exchange."""
    found = [c for c in collectives(hlo.parse(program.as_text())) if c.group > 1]
    return [(c.kind, math.prod(a.dims), a.bytes, "while" in c.source) for c in found for a in c.arrays]


@pytest.mark.parametrize("mesh", ["data=8", "sequence=8", "slice=2,fsdp=2,tensor=2", "data=2,sequence=2,tensor=2"])
def test_chosen_positions_are_those_of_one_device_and_devices_exchange_no_more_than_them(mesh):
    rng, rules = np.random.default_rng(0), rules_of(mesh)
    x, weights = (jnp.asarray(rng.normal(size=(ROWS, n, WIDTH)), jnp.float32) for n in (LENGTH, READ))
    chosen = jnp.asarray(rng.integers(0, LENGTH, (ROWS, READ)))

    def read(rules, x, chosen, weights):
        with placed_by(rules):
            values, pull = jax.vjp(lambda x: gather_positions(x, chosen), x)
            return values, pull(weights)[0]

    placed = jax.device_put(x, NamedSharding(rules.mesh, rules.spec(("batch", "length", "heads"), x.shape)))
    program = compiled(functools.partial(read, rules), placed, chosen, weights)
    check_close(program(placed, chosen, weights), jax.jit(functools.partial(read, None))(x, chosen, weights), 1e-6)
    most = 0 if mesh == "data=8" else ROWS * READ * WIDTH
    assert max((elements for _, elements, _, _ in moved(program)), default=0) <= most


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "data=4,sequence=2"])
def test_the_softmax_in_blocks_is_that_of_one_device_and_no_device_reads_anothers_tokens(mesh, monkeypatch):
    rng, rules = np.random.default_rng(0), rules_of(mesh)
    monkeypatch.setattr(blocked_softmax, "LOGITS", 8 * VOCAB)  # several blocks on each device
    hidden, table = (rng.normal(size=(*n, WIDTH)).astype(np.float32) for n in ((ROWS, LENGTH), (VOCAB,)))
    targets, weights = rng.integers(0, VOCAB, (ROWS, LENGTH)), rng.random((1, ROWS, LENGTH))
    rest = (jnp.zeros(VOCAB), jnp.asarray(targets, jnp.int32), jnp.asarray(weights, jnp.float32))

    def both(rules, *factors):
        with placed_by(rules):
            loss = lambda *factors: blocked_softmax.softmax_sums(*factors, *rest).nats[0]
            return jax.value_and_grad(loss, (0, 1))(*factors)

    place = lambda x, *names: jax.device_put(x, NamedSharding(rules.mesh, rules.spec(names, x.shape)))
    placed = place(hidden, "batch", "length", None), place(table, "vocab", None)
    program = compiled(functools.partial(both, rules), *placed)
    (loss, found), (expected, slopes) = program(*placed), jax.jit(functools.partial(both, None))(hidden, table)
    assert float(loss) == pytest.approx(float(expected), abs=1e-2)  # a sum of 2,000
    check_close(found, slopes, 1e-4)
    assert {kind for kind, *_ in moved(program)} <= {"all-reduce"}
    of_blocks = max((elements for _, elements, _, looped in moved(program) if looped), default=0)
    assert of_blocks < VOCAB * WIDTH / 4  # not the table's gradient, which is summed once


def attended(rules, rate, q, k, v, mask, noise, weights):
    """(outputs, gradients) of a pattern's attention."""
    with placed_by(rules):
        attend = lambda *qkv: sparse.attention(*qkv, mask, dropout_rate=rate, noise=noise)
        outputs, pull = jax.vjp(attend, q, k, v)
        return outputs, pull(weights)


@functools.cache
def of_one_device(name):
    (q, k, v, mask, noise, weights), rate = random_case(KINDS[name], 0), KINDS[name].rate
    return jax.jit(functools.partial(attended, None, rate))(q, k, v, mask, noise, weights)


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("longformer", "slice=2,sequence=2,tensor=2"),
        ("causal", "sequence=8"),
        ("repeats", "data=2,sequence=2,tensor=2"),
        ("ranked", "fsdp=2,sequence=4"),
        ("bigbird", "data=2,tensor=2"),
        pytest.param("bigbird", "sequence=8", marks=pytest.mark.slow),
        pytest.param("longformer", "sequence=8", marks=pytest.mark.slow),
    ],
)
def test_a_pattern_on_a_mesh_is_that_of_one_device_in_outputs_gradients_and_dropout(name, mesh):
    (q, k, v, mask, noise, weights), rules = random_case(KINDS[name], 0), rules_of(mesh)
    outputs, gradients = jax.jit(functools.partial(attended, rules, KINDS[name].rate))(q, k, v, mask, noise, weights)
    expected, slopes = of_one_device(name)
    real = np.asarray(mask.segments > 0)
    np.testing.assert_allclose(outputs[real], expected[real], rtol=0, atol=2e-6)
    check_close(gradients, slopes, 1e-5)


@pytest.mark.parametrize("mesh", ["sequence=4,tensor=2", pytest.param("sequence=8", marks=pytest.mark.slow)])
def test_devices_exchange_rows_once_for_what_is_drawn_and_else_a_few_blocks(mesh):
    rules, shape = rules_of(mesh), (1, LONG, HEADS, HEAD_DIM)
    with placed_by(rules):
        blocks = jax.tree.map(lambda array: array[0], blocks_of(BIGBIRD, 1, HEADS, LONG))
    where = NamedSharding(rules.mesh, rules.spec(("batch", "length", "heads", None), shape))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    mask = Mask(jnp.ones((1, LONG), jnp.int32), blocks=blocks)
    found = moved(compiled(lambda q, k, v, mask: attended(rules, 0.0, q, k, v, mask, None, q), x, x, x, mask))
    of_kind = lambda *kinds: sum(size for kind, _, size, _ in found if kind in kinds)
    heads = HEADS // rules.mesh.shape["tensor"]
    rows, block = (tokens * heads * HEAD_DIM * 4 for tokens in (LONG, BIGBIRD.block))
    assert of_kind("all-gather") == 2 * rows  # keys and values; the other way their gradients
    # Of keys and values neighbours and columns, of rows their queries and values; gradients of all.
    few = 2 * (2 * (len(blocks.offsets) - 1 + len(blocks.columns)) + 2 * len(blocks.rows)) * block
    assert few <= sum(size for _, _, size, _ in found) - 4 * rows <= 1.2 * few


def test_a_mesh_cuts_rows_with_a_pattern_into_whole_blocks_alone():
    def cut(length):
        with placed_by(rules_of("sequence=4,tensor=2")):
            return blocks_of(BIGBIRD, 1, HEADS, length)

    assert cut(128).number == 16
    with pytest.raises(ValueError, match="sequence=4 cuts rows of 144 .* no multiple of model.pattern.block=8: .* 32"):
        cut(144)
    with pytest.raises(ValueError, match="sequence=4 does not divide length, which is 130"):
        cut(130)


def test_devices_add_up_in_float32_also_what_is_bfloat16():
    """Columns, global tokens and what global queries see, and their gradients; those of drawn blocks are not."""
    mesh = AbstractMesh((1, 1, 1, 4, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    x, rules = jnp.zeros((1, 32 * BIGBIRD.block, HEADS, HEAD_DIM), jnp.bfloat16), activation_rules(mesh)
    with placed_by(rules):
        blocks = jax.tree.map(lambda array: array[0], blocks_of(BIGBIRD, 1, HEADS, x.shape[1]))
    mask = Mask(jnp.ones(x.shape[:2], jnp.int32), blocks=blocks, globals=jnp.zeros((1, 2), jnp.int32))
    traced = jax.make_jaxpr(lambda q, k, v: attended(rules, 0.0, q, k, v, mask, None, x))(x, x, x)
    sums = [e for e in equations(traced.jaxpr) if "psum" in e.primitive.name and "sequence" in e.params["axes"]]
    assert len(sums) >= 8 and {array.aval.dtype.name for e in sums for array in e.invars} == {"float32"}


# A recipe's step: weight gradients are added up in float32, whatever the products are computed in, and each once.


SUMS = ("all-reduce", "reduce-scatter")
BERT_WIDTH = 32  # of the two layers of the tests' BERT


@functools.cache
def partitioned(name, mesh):
    """A recipe's step in bfloat16 as XLA partitions it, before the CPU's compiler widens what it cannot add so.

    arrays: (kind, dtype, source, elements that each device exchanges).   size: parameter path -> scalars.
    """
    assembly = assemble(simulated.recipe(name), Program(dtype="bfloat16"))
    step = placement.stages(assembly, mesh_of(mesh))[0].train
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        step.run.lower(*step.arguments).compile(compiler_options=dump)
        (file,) = Path(folder).glob("*placed*.after_spmd-partitioning*.txt")
        module = hlo.parse(file.read_text())
    found = [collective for collective in collectives(module) if collective.group > 1]
    arrays = [(c.kind, a.dtype, c.source, c.times * math.prod(a.dims)) for c in found for a in c.arrays]
    size = {path: shape.size for path, shape in leaves(step.arguments[0].params)}
    return SimpleNamespace(assembly=assembly, arrays=arrays, size=size)


def numbers(program, *kinds):
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
    assert -0.05 * parameters < numbers(program, *SUMS) - implied < 100
    assert by_fsdp * matrices <= numbers(program, "all-gather") <= 2 * by_fsdp * matrices


def test_over_tensor_devices_sum_a_layer_s_activations_and_nothing_else():
    """BERT's look-ups, and of each layer attention's and feed-forward's outputs and four gradients of inputs: of
    queries, keys, values and feed-forward; of the last layer by the positions that are read. Of the logits their
    maximum, sum, target and the gradient of what they came from. No weight's gradient, and nothing is gathered."""
    program = partitioned("bert", "tensor=2")
    phase, objective = program.assembly.recipe.phases[0], program.assembly.recipe.objective
    rows, length, predictions = phase.batch_size, phase.length, objective.spec(phase)["prediction_positions"][0][0]
    whole, read = rows * length * BERT_WIDTH, rows * (predictions + 1) * BERT_WIDTH  # the first token, for pairs
    first, last, logits = 6 * whole, 2 * whole + 4 * read, rows * predictions * (3 + BERT_WIDTH)
    assert 0 <= numbers(program, *SUMS) - (whole + first + last + logits) < 100  # a few scalars
    assert numbers(program, "all-gather", "collective-permute", "all-to-all") == 0


# Every kind of collective in a loop of 5 turns, and a parameter gathered by the partitioner outside of it.


def body(x, _):
    x = jax.lax.all_gather(x, "data", tiled=True)
    x = jax.lax.psum_scatter(x, "data", tiled=True)
    x = jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)])
    x = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
    return jax.lax.psum(x, ("data", "tensor")), None


EXPECTED = {  # per device: f32[32, 16] is 2 KiB, a device's share of its rows f32[8, 16] 512 bytes
    ("all-gather", 4, 5): 5 * 2048,
    ("reduce-scatter", 4, 5): 5 * 2048,
    ("collective-permute", 2, 5): 5 * 512,
    ("all-to-all", 4, 5): 5 * 512,
    ("all-reduce", 8, 5): 5 * 512,
    ("all-gather", 2, 1): 16 * 64 * 4,
}


def test_collectives_of_a_real_program_are_read_with_their_loop():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    inner = lambda x: jax.lax.scan(body, x, None, length=5)[0]
    looped = jax.shard_map(inner, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    whole = lambda x, w: looped(x) @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    text = compiled(whole, place((32, 16), P("data")), place((16, 64), P(None, "tensor"))).as_text()
    assert hlo.parse(text).devices == 8
    unnoted = re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", text)  # turns that XLA did not write down
    assert unnoted != text
    for program in (text, unnoted):
        assert {(c.kind, c.group, c.times): c.bytes for c in collectives(hlo.parse(program))} == EXPECTED
