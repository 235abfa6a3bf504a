"""What devices read of each other's rows where a mesh cuts them: right, and no more than there is to read."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from models.attention import plain, sparse
from models.attention.exchange import routed
from models.attention.kernels import pattern_kernel, relative_kernel
from models.attention.kernels.kernel import Attention
from models.attention.kernels.row_attention import Setting, attend_rows, fits, interleaved
from models.attention.kernels.splash import splash
from models.attention.kernels.table import KERNELS
from models.attention.mask import Mask
from models.attention.operands import Biases, Context
from models.attention.patterns.pattern import Pattern, blocks_of, on_host
from models.attention.relative import asked, relative_attention
from models.attention.self_attention import attention_of
from models.blocks.layer import LayerSizes
from models.blocks.positions import gather_positions
from models.core.noise import row_keys
from models.core.sharding import placed_by
from models.families.xlnet import both_masks
from pretrain.objectives import blocked_softmax
from tests.contract.test_contract import equations
from tests.models.test_sparse import Kind, random_case
from tests.tpu.simulated import mesh_of
from tpu import hlo
from tpu.collectives import collectives
from tpu.mesh import AXES
from tpu.rules import activation_rules

pytestmark = pytest.mark.own_process(devices=8)
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


def check(found, expected, atol):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=atol), found, expected)


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
    check(program(placed, chosen, weights), jax.jit(functools.partial(read, None))(x, chosen, weights), 1e-6)
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
    check(found, slopes, 1e-4)
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
    with placed_by(rules):
        blocks = routed(jax.tree.map(lambda array: np.asarray(array)[None], mask.blocks), q.shape[2], q.shape[1])
    placed = dataclasses.replace(mask, blocks=jax.tree.map(lambda array: jnp.asarray(array[0]), blocks))
    outputs, gradients = jax.jit(functools.partial(attended, rules, KINDS[name].rate))(q, k, v, placed, noise, weights)
    expected, slopes = of_one_device(name)
    real = np.asarray(mask.segments > 0)
    np.testing.assert_allclose(outputs[real], expected[real], rtol=0, atol=2e-6)
    check(gradients, slopes, 1e-5)


def named(parts, groups):
    """Bytes of what the device that reads most reads of others' by the table, forward and backward."""
    blocks = on_host(BIGBIRD, 1, HEADS, LONG)
    own, of_group, needed = blocks.drawn.shape[2] // parts, HEADS // groups, []
    for head, first in itertools.product(range(0, HEADS, of_group), range(0, blocks.drawn.shape[2], own)):
        tables = blocks.drawn[0, head : head + of_group, first : first + own]
        needed.append(sum(len(np.unique(table[table >= 0])) for table in tables))
    read = max(needed) + (len(blocks.offsets) - 1 + len(blocks.columns)) * of_group  # of keys and of values
    of_rows = len(blocks.rows) * of_group  # as queries there, as values back
    return 2 * 2 * (read + of_rows) * 4 * BIGBIRD.block * HEAD_DIM


@pytest.mark.parametrize(
    "mesh, parts, groups",
    [("sequence=4,tensor=2", 4, 2), pytest.param("sequence=8", 8, 1, marks=pytest.mark.slow)],
)
def test_devices_exchange_what_the_table_names_and_hardly_more(mesh, parts, groups):
    rules, shape = rules_of(mesh), (1, LONG, HEADS, HEAD_DIM)
    with placed_by(rules):
        blocks = routed(on_host(BIGBIRD, 1, HEADS, LONG), HEADS, LONG)
    mask = Mask(jnp.ones((1, LONG), jnp.int32), blocks=jax.tree.map(lambda array: jnp.asarray(array[0]), blocks))
    where = NamedSharding(rules.mesh, rules.spec(("batch", "length", "heads", None), shape))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    found = moved(compiled(lambda q, k, v, mask: attended(rules, 0.0, q, k, v, mask, None, q), x, x, x, mask))
    assert {kind for kind, *_ in found} == {"collective-permute", "all-to-all", "all-reduce"}  # keys are not gathered
    total = sum(size for _, _, size, _ in found)
    assert named(parts, groups) <= total <= 1.2 * named(parts, groups)  # as many blocks to each device as to any
    whole = 2 * 2 * LONG * HEADS // groups * HEAD_DIM * 4
    assert total < whole * (0.4 if parts == 8 else 0.6)  # with 3 blocks drawn, those of 4 parts are most blocks


def test_devices_add_up_in_float32_also_what_is_bfloat16():
    """Columns, global tokens and what global queries see, and their gradients."""
    mesh = AbstractMesh((1, 1, 1, 4, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    x, rules = jnp.zeros((1, 32 * BIGBIRD.block, HEADS, HEAD_DIM), jnp.bfloat16), activation_rules(mesh)
    with placed_by(rules):
        blocks = jax.tree.map(lambda array: array[0], blocks_of(BIGBIRD, 1, HEADS, x.shape[1]))
    mask = Mask(jnp.ones(x.shape[:2], jnp.int32), blocks=blocks, globals=jnp.zeros((1, 2), jnp.int32))
    traced = jax.make_jaxpr(lambda q, k, v: attended(rules, 0.0, q, k, v, mask, None, x))(x, x, x)
    sums = [e for e in equations(traced.jaxpr) if "psum" in e.primitive.name and "sequence" in e.params["axes"]]
    assert len(sums) >= 8 and {array.aval.dtype.name for e in sums for array in e.invars} == {"float32"}


# Kernels across a cut sequence and cut heads


TENSOR_CUTS = "--mesh tensor=4 cuts model.heads=4 in model.width=256: its parts do not fill blocks of 128"
SEQUENCE_CUTS = "--mesh sequence=2 cuts rows: leave sequence out"
UNFIT = ("data=2,tensor=4", [TENSOR_CUTS]), ("data=2,sequence=2,tensor=2", [SEQUENCE_CUTS])


def slopes(rules, loss, *arguments):
    """Its gradients by these arguments where these rules are in force."""

    def placed(*arguments):
        with placed_by(rules):
            return loss(*arguments)

    return jax.jit(jax.grad(placed, tuple(range(len(arguments)))))(*arguments)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(math.prod(shape)).normal(size=shape), jnp.float32)


def test_splash_attends_across_a_cut_sequence_and_cut_heads():
    q, k, v, w = normal(4, 2, 256, 2, 64)
    mask = Mask(jnp.asarray(np.random.default_rng(0).integers(1, 3, (2, 256))))
    rules, swap = rules_of("data=2,sequence=2,tensor=2"), lambda x: jnp.swapaxes(x, 1, 2)  # heads first
    ours = lambda q, k, v: (swap(splash(swap(q), swap(k), swap(v), mask, interpret=True)) * w).sum()
    theirs = lambda q, k, v: (plain.attention(q, k, v, mask, dropout_rate=0.0, noise=None) * w).sum()
    check(slopes(rules, ours, q, k, v), slopes(None, theirs, q, k, v), 5e-6)
    with placed_by(rules):
        cut, parts = Attention(256, 256, 4, 0.0), Attention(384, 256, 4, 0.0)
        assert KERNELS["splash"].obstacles(cut) == []
        assert KERNELS["splash"].obstacles(parts) == [
            "--mesh sequence=2 cuts length=384 into parts that are no multiple of 128"
        ]
        assert not fits(cut) and KERNELS["cudnn"].obstacles(cut) == [SEQUENCE_CUTS]


def test_attention_of_whole_rows_has_its_heads_cut():
    x, w = normal(2, 256, 3 * 256), normal(2, 256, 256)
    segments = jnp.asarray(np.random.default_rng(0).integers(1, 3, (2, 256)))

    def loss(x):
        flat, setting = interleaved(*jnp.split(x, 3, -1)), Setting(64, 0.2, interpret=True)
        out, _ = attend_rows(flat, jnp.zeros(3 * 256), segments, row_keys(0, 0, jnp.arange(2)), setting)
        return (out.reshape(w.shape) * w).sum()

    rules = rules_of("data=2,tensor=2")
    check(slopes(rules, loss, x), slopes(None, loss, x), 5e-6)
    with placed_by(rules):
        assert fits(Attention(256, 256, 4, 0.0))
        assert not fits(Attention(256, 128, 2, 0.0))  # 64 lanes on each device


@pytest.mark.parametrize("stream, n, table", [(0, 128, 1), (1, 3, 2)])
def test_relative_attention_has_its_heads_cut(stream, n, table):
    rng = np.random.default_rng(0)
    ranks = jnp.asarray(np.argsort(rng.random((2, 128)), axis=1).astype(np.int32))
    ones, positions = jnp.ones_like(ranks), jnp.asarray([[3, 8, 70], [0, 5, 127]])
    mask, types = both_masks(ones, ones, ranks, ranks, positions, jnp.ones((2, 128), jnp.int32))[stream]
    keys, context = (
        row_keys(0, 0, jnp.arange(2)),
        Context(normal(2, 256, 256), normal(2, 256, 256) / 2, normal(table, 384, 256)),
    )
    x = normal(2, n, 256), context, Biases(normal(256), normal(256) / 2, normal(256) / 3, normal(2, 256))
    settings = {"dropout_rate": 0.2, "noise": keys}
    ours = lambda *x: (relative_kernel.by_kernel(*x, mask, types, 4, interpret=True, **settings) ** 2).sum()
    theirs = lambda *x: (relative_attention(*x, mask, types, 4, **settings) ** 2).sum()
    expected = slopes(None, theirs, *x)
    near = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(near, slopes(rules_of("data=2,tensor=2"), ours, *x), expected)
    for mesh, said in UNFIT:
        with placed_by(rules_of(mesh)):
            obstacles = KERNELS["relative"].obstacles(asked(x[0], context, mask, 4, 0.2))
            assert obstacles == (said if "sequence" not in mesh or n > 3 else [])


def test_the_kernel_of_patterns_has_its_heads_cut():
    q, k, v, w = normal(4, 2, 512, 256)
    tables = blocks_of(Pattern("bigbird", random=1), 1, 4, 512)
    segments, chosen = jnp.asarray(np.random.default_rng(0).integers(1, 3, (2, 512))), jnp.array([[9], [400]])
    mask = Mask(segments, blocks=jax.tree.map(lambda x: x[0], tables), globals=chosen)
    settings = {"dropout_rate": 0.2, "noise": row_keys(0, 0, jnp.arange(2)), "interpret": True}
    loss = lambda *qkv: (pattern_kernel.by_kernel(*qkv, mask, 4, **settings) * w).sum()
    check(slopes(rules_of("data=2,tensor=2"), loss, q, k, v), slopes(None, loss, q, k, v), 5e-6)
    sizes = LayerSizes(256, 4, 16, "gelu", 0.0, 0.1, 1e-12, 0.02)
    for mesh, said in UNFIT:
        with placed_by(rules_of(mesh)):
            assert KERNELS["pattern"].obstacles(attention_of(sizes, 512, blocks=tables)) == said
